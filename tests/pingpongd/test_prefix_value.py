"""What comes back, how often, and what caches are believed to hold of it."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import KeptPrefix, Literals, PreparedAgent
from pingpongd import prefix_value
from pingpongd.kept_prefixes import KeptPrefixes
from pingpongd.prefix_memory import PrefixMemory
from pingpongd.prefix_value import PrefixValue
from pingpongd.shapes import chain_shape

HOUR = 3600.0


def rungs(*parts: tuple[str, int]) -> list[tuple[str, int]]:
    """Of a prompt made of texts of so many tokens."""
    ids = [int(hashlib.sha256(f"{text}{at}".encode()).hexdigest()[:4], 16) for text, n in parts for at in range(n)]
    prompt = PreparedAgent(segments=[Literals(ids=ids)])
    return list(chain_shape([[]], [prompt]).rungs[0])


def test_what_came_once_is_not_expected() -> None:
    value = PrefixValue()
    value.came("a", rungs(("static", 640)), 0.0)
    assert value.kept("a", 1.0) is None
    assert value.kept("b", 1.0) is None


def test_what_differs_from_run_to_run_is_not_static() -> None:
    value = PrefixValue()
    value.came("a", rungs(("static", 640), ("input 1", 300)), 0.0)
    value.came("a", rungs(("static", 640), ("input 2", 30)), 60.0)
    kept = value.kept("a", 60.0)
    assert kept is not None
    assert kept.tokens == 640
    value.came("a", rungs(("static", 640), ("input 2", 30)), 120.0)
    kept = value.kept("a", 120.0)
    assert kept is not None
    assert kept.tokens == 670, "the same input came again"
    value.came("a", rungs(("other", 640)), 180.0)
    assert value.kept("a", 180.0) is None, "another text by the same name"


def test_the_pace_is_estimated_and_fades() -> None:
    value = PrefixValue()
    text = rungs(("static", 640))
    value.came("a", text, 0.0)
    value.came("a", text, 1.0)
    twice = value.kept("a", 1.0)
    assert twice is not None
    assert twice.reuse == pytest.approx(1.0, rel=0.01), "not 3600: an hour without it went before"
    for minute in range(1, 600):
        value.came("a", text, minute * 60.0)
    often = value.kept("a", 600 * 60.0)
    assert often is not None
    assert 45 < often.reuse < 60, "once a minute, less the hour"
    later = value.kept("a", 600 * 60.0 + 8 * HOUR)
    assert later is not None
    assert later.reuse < often.reuse / 4
    assert value.kept("a", 600 * 60.0 + 80 * HOUR) is None
    daily = PrefixValue()
    for day in range(30):
        daily.came("a", text, day * 24 * HOUR)
    assert daily.kept("a", (29 * 24 + 12) * HOUR) is None, "no cache is held for a day for it"


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_value, "_MOST_RUNGS", 100)
    value = PrefixValue()
    for name in range(50):
        value.came(name, rungs((f"text {name}", 640)), float(name))
        value.came("often", rungs(("static", 640)), float(name))
    assert len(value) == 10
    assert value.kept("often", 50.0) is not None
    monkeypatch.setattr(prefix_value, "_MOST_AGENTS", 3)
    value.came("one more", rungs(("x", 64)), 60.0)
    assert len(value) == 3


def test_a_prompt_without_a_static_beginning_is_no_trouble() -> None:
    value = PrefixValue()
    for now in (0.0, 1.0, 2.0):
        value.came("a", rungs(), now)
    assert value.kept("a", 3.0) is None


# ---------------------------------------------------------------------------------------------------------- the memory


def flood(memory: PrefixMemory, chains: int) -> None:
    for chain in range(chains):
        memory.computed(rungs((f"other {chain}", 256)), 400)


def test_the_memory_believes_that_what_is_expected_stays() -> None:
    memory, known = PrefixMemory(4000, 2000), rungs(("known", 640))
    memory.computed(known, 1000, KeptPrefix(tokens=640, reuse=1.0), 0.0)
    flood(memory, 50)
    assert {digest for digest, _ in known} <= memory.held
    memory.computed(known, 1000)
    flood(memory, 50)
    assert {digest for digest, _ in known} <= memory.held
    memory.forget()
    assert memory.held == frozenset()
    memory.computed(known, 1000)
    flood(memory, 50)
    assert not {digest for digest, _ in known} & memory.held


def test_only_the_static_part_is_believed_to_stay_and_no_more_than_may() -> None:
    memory, known = PrefixMemory(4000, 640), rungs(("known", 640), ("input", 200))
    memory.computed(known, 1000, KeptPrefix(tokens=640, reuse=1.0), 0.0)
    other = rungs(("second", 640))
    memory.computed(other, 1000, KeptPrefix(tokens=640, reuse=0.5), 0.0)
    flood(memory, 50)
    assert {digest for digest, _ in known[:10]} == memory.held & {digest for digest, _ in known}
    assert not {digest for digest, _ in other} & memory.held


def test_what_the_host_holds_comes_back() -> None:
    memory, texts = PrefixMemory(2000, 640, 1300), [rungs((f"known {name}", 640)) for name in range(3)]
    for text in texts:
        memory.computed(text, 700, KeptPrefix(tokens=640, reuse=1.0), 0.0)
    flood(memory, 50)
    assert [{digest for digest, _ in text} <= memory.held for text in texts] == [False, True, True]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 900), st.floats(0, 5)), max_size=40), st.integers(0, 2000))
def test_no_more_is_held_than_there_is_room(runs: list[tuple[int, int, float]], keep: int) -> None:
    memory = PrefixMemory(2000, keep)
    for now, (name, tokens, reuse) in enumerate(runs):
        ladder = rungs((f"{name % 3}", min(tokens, 200)), (f"{name}", tokens))
        expected = KeptPrefix(tokens=max(1, tokens // 2), reuse=reuse) if reuse else None
        memory.computed(ladder, tokens + 50, expected, float(now))
        sizes = [size for _, size in memory._held.values()] + list(memory._kept.values())
        assert memory._used == sum(sizes) <= 2000
        assert not memory._held.keys() & memory._kept.keys()
        assert len(memory.held) == len(memory._held) + len(memory._kept)


def test_hops_are_told_but_for_what_shares_no_cache_and_what_text_may_change() -> None:
    def record(*, isolate: bool = False, text: bool = False, model: str = "m") -> Any:
        shape = SimpleNamespace(rungs=(rungs(("static", 640)), rungs(("step", 640))), grid=None)
        agents = [SimpleNamespace(name="a", is_step=False), SimpleNamespace(name="s", is_step=True)]
        return SimpleNamespace(
            chain=SimpleNamespace(name="c", agents=agents),
            job=SimpleNamespace(engine_model=lambda index: model),
            options=SimpleNamespace(isolate=isolate),
            prepared=[SimpleNamespace(text=text), SimpleNamespace(text=False)],
            shape=shape,
        )

    prefixes = KeptPrefixes()
    for _ in range(2):
        prefixes.began(record(isolate=True))
        prefixes.began(record(model="other"))
    assert prefixes.of(record(), 0) is None
    for _ in range(2):
        prefixes.began(record())
    kept = prefixes.of(record(), 0)
    assert kept is not None
    assert (kept.tokens, kept.reuse) == (640, pytest.approx(1.0, rel=0.01))
    assert prefixes.of(record(), 1) is None, "a step has no prompt"
    assert prefixes.of(record(isolate=True), 0) is None
    as_text = prefixes.of(record(text=True), 0)
    assert as_text is not None
    assert as_text.tokens == 608
