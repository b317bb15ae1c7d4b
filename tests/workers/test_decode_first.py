"""The policy: which grant and why, what it learns by, and its bounds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingpong_worker.decode_first import LEAST_TOKENS, MEASURE, PATIENCE, DecodeFirst, Grant, StepView
from pingpong_worker.step_prices import StepKind, StepPrices, attention_work

GRAPHS = [1, 2, 4, 8, *range(16, 513, 16)]
MAX_TOKENS = 2048


def view(**changes: object) -> StepView:
    usual: dict[str, object] = {
        "decodes": 1,
        "decode_work": 1000.0,
        "target_ratio": 1.3,
        "target_ms": None,
        "append_tokens": 5000,
        "append_context": 1000,
        "finalizes_wait": False,
        "starved_steps": 0,
    }
    return StepView(**{**usual, **changes})  # type: ignore[arg-type]


class Engine:
    """A machine with a price list, and a scheduler that does what the policy says."""

    def __init__(self, graphs: list[int], *, step: float, row: float, work: float, beside: float, noise: float) -> None:
        self.graphs = graphs
        self._step, self._row, self._work, self._beside, self._noise = step, row, work, beside, noise
        self._draw = random.Random(3)
        self.prices = StepPrices(graphs)
        self.policy = DecodeFirst(self.prices, graphs, MAX_TOKENS)
        self.starved = 0

    def cost(self, rows: int, work: float, kind: StepKind) -> float:
        size = next((size for size in self.graphs if size >= rows), rows)
        return self._step + self._row * size + self._work * work + (self._beside if kind == "beside" else 0.0)

    def take(self, rows: int, work: float, kind: StepKind) -> float:
        """A step; its price is learnt."""
        seconds = self.cost(rows, work, kind) * self._draw.uniform(1 - self._noise, 1 + self._noise)
        self.prices.learn(rows, work, seconds, kind)
        return seconds

    def decode(self, **changes: object) -> tuple[Grant, float]:
        """A step with decodes, and what the machine's price list says of it, as a multiple of the one without."""
        seen = view(starved_steps=self.starved, **changes)
        grant = self.policy.grant(seen)
        if seen.append_tokens:
            self.starved = 0 if grant.tokens else self.starved + 1
        work = seen.decode_work + attention_work(seen.append_context, grant.tokens)
        kind: StepKind = "beside" if grant.tokens else "decodes"
        self.take(seen.decodes + grant.tokens, work, kind)
        alone = self.cost(seen.decodes, seen.decode_work, "decodes")
        return grant, self.cost(seen.decodes + grant.tokens, work, kind) / alone


def gpu(noise: float = 0.03) -> Engine:
    return Engine(GRAPHS, step=8.4e-3, row=20e-6, work=2.4e-9, beside=0.4e-3, noise=noise)


def cpu(noise: float = 0.03) -> Engine:
    return Engine([], step=15.4e-3, row=0.6e-3, work=10e-9, beside=0.0, noise=noise)


def prefill(engine: Engine) -> None:
    """What an engine has seen after its warm-up."""
    for tokens in (16, 64, 256):
        engine.take(tokens, attention_work(0, tokens), "prompts")


def test_nothing_to_append() -> None:
    assert gpu().policy.grant(view(append_tokens=0)) == Grant(0, "no appends")


def test_a_prompt_that_is_waited_for_has_the_step() -> None:
    assert gpu().policy.grant(view(finalizes_wait=True)) == Grant(0, "finalize")
    assert gpu().policy.grant(view(finalizes_wait=True, decodes=0, decode_work=0.0)) == Grant(0, "finalize")


def test_full_speed_where_nothing_decodes() -> None:
    assert gpu().policy.grant(view(decodes=0, decode_work=0.0)) == Grant(MAX_TOKENS, "full speed")
    assert gpu().policy.grant(view(decodes=0, decode_work=0.0, append_tokens=7)) == Grant(7, "full speed")


def test_decodes_are_priced_before_anything_rides_on_them() -> None:
    engine = gpu()
    assert engine.policy.grant(view()) == Grant(0, "unpriced")
    engine.take(1, 1000, "decodes")
    assert engine.policy.grant(view()).tokens > 0


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from([gpu, cpu]),
    ratio=st.floats(1.1, 3),
    decodes=st.integers(1, 12),
    context=st.integers(0, 12000),
    warm=st.booleans(),
)
def test_no_step_passes_the_target_once_prices_are_known(
    kind: type[Engine], ratio: float, decodes: int, context: int, warm: bool
) -> None:
    engine = kind()  # type: ignore[call-arg]
    if warm:
        prefill(engine)
    changes = {
        "target_ratio": ratio,
        "decodes": decodes,
        "decode_work": 2000.0 * decodes,
        "append_context": context,
    }
    for _ in range(300):
        engine.decode(**changes)
    for _ in range(200):
        grant, multiple = engine.decode(**changes)
        if grant.reason != "starved":
            assert multiple <= ratio * 1.08


def test_it_explores_from_nothing_up_to_what_the_target_bears() -> None:
    engine = gpu(noise=0.0)
    grants = [engine.decode(target_ratio=2.0)[0] for _ in range(400)]
    assert {"unpriced", "exploring"} <= {grant.reason for grant in grants[:60]}
    best = max(
        size - 1
        for size in GRAPHS
        if engine.cost(size, 1000 + attention_work(1000, size - 1), "beside") <= 2.0 * engine.cost(1, 1000, "decodes")
    )
    assert best >= 255
    assert max(grant.tokens for grant in grants[-50:]) >= 0.8 * best
    tried = [grant.tokens for grant in grants if grant.tokens]
    assert all(after <= 2 * max(tried[:at]) + 16 for at, after in enumerate(tried) if at), "in small steps"


def test_sizes_fill_graphs() -> None:
    engine = gpu(noise=0.0)
    prefill(engine)
    for _ in range(200):
        engine.decode(decodes=3, decode_work=3000.0)
    grants = [engine.decode(decodes=3, decode_work=3000.0)[0] for _ in range(20)]
    assert all(grant.tokens + 3 in GRAPHS for grant in grants if grant.tokens)
    assert any(grant.tokens for grant in grants)


def test_the_tighter_of_ratio_and_time_counts() -> None:
    engine = cpu(noise=0.0)
    prefill(engine)
    for _ in range(100):
        engine.decode(target_ratio=3.0)
    by_ratio = engine.policy.grant(view(target_ratio=3.0)).tokens
    by_time = engine.policy.grant(view(target_ratio=3.0, target_ms=22.0)).tokens
    assert 0 < by_time < by_ratio
    assert engine.policy.grant(view(target_ratio=1.3, target_ms=10_000.0)).tokens < by_ratio
    assert engine.policy.grant(view(target_ms=1.0)) == Grant(0, "target")


def test_a_ride_that_costs_clearly_more_than_a_prefill_of_its_own_is_left() -> None:
    # A step beside decodes costs 1 ms more however few tokens it has; a prefill at full speed 0.024 ms a token.
    engine = Engine(GRAPHS, step=8e-3, row=20e-6, work=0.0, beside=1e-3, noise=0.0)
    engine.take(2048, 0, "prompts")
    engine.take(1, 0, "decodes")
    for tokens in (2, 8, 16, 64, 512):
        for _ in range(4):
            engine.take(tokens, 0, "beside")
    assert engine.policy.grant(view(target_ratio=2.0, append_tokens=15)) == Grant(0, "dear")
    assert engine.policy.grant(view(target_ratio=2.5, append_tokens=500)).tokens > 100


def launching_gpu() -> Engine:
    """As measured on a GPU at 12k of context: what is planned ahead costs little, prompts alone wait for launches."""

    class Launching(Engine):
        def cost(self, rows: int, work: float, kind: StepKind) -> float:
            if kind == "prompts":
                return max(14e-3 + 20e-6 * rows, 40e-6 * rows)
            attention = 0.7e-6 / 12000 * work
            size = next((size for size in self.graphs if size >= rows), rows)
            if kind == "decodes":
                return 8.9e-3
            return 9.2e-3 + 20e-6 * max(0, size - 64) + attention

    engine = Launching([1, 2, 4, 8, 16, 32, 64, 128, 256], step=0, row=0, work=0, beside=0, noise=0.02)
    for rows in (8192, 16, 64, 128, 280):
        for _ in range(4):
            engine.take(rows, attention_work(0, rows), "prompts")
    return engine


def test_prompts_alone_do_not_say_what_rides() -> None:
    engine = launching_gpu()
    grants = [engine.decode(append_context=12000, decode_work=12000.0)[0] for _ in range(40)]
    assert max(grant.tokens for grant in grants[:20]) >= 63
    assert sum(grant.tokens for grant in grants) >= 20 * 63


H200_STEP_MS = {
    # Qwen3-14B's shape, full graphs: a step by rows, 2,048 and 12,288 tokens into the prompts; ms.
    1: (8.53, 8.95),
    16: (8.94, 9.91),
    32: (8.96, 10.54),
    64: (9.41, 11.14),
    96: (9.98, 12.47),
    128: (10.12, 12.64),
    160: (11.38, 15.33),
    192: (12.53, 16.64),
    256: (14.33, 19.46),
    384: (19.35, 25.33),
    512: (26.54, 35.20),
}
PREFILL_MS = 0.0467


class H200:
    """The prices of an H200 at one context."""

    def __init__(self, late: bool) -> None:
        self._late = late

    def reach(self, kind: StepKind) -> int:
        return 512 if kind == "beside" else 8192

    def price(self, rows: int, work: float, kind: StepKind) -> float:
        if kind == "prompts":
            return rows * PREFILL_MS / 1e3
        return H200_STEP_MS[next(size for size in H200_STEP_MS if size >= rows)][self._late] / 1e3


@pytest.mark.parametrize(
    ("late", "ratio", "append", "left", "tokens"),
    [
        (False, 1.5, 12288, 256, 127),  # a tile of 128 rows is full: the next row costs more than a millisecond
        (True, 1.5, 12288, 256, 127),
        (False, 1.5, 12288, None, 127),
        (True, 1.2, 12288, 256, 31),  # all that the target bears
        (False, 1.5, 12288, 64, 191),  # not through in time by 127 a step, and 64 more cost less than a prefill would
        (True, 1.9, 12288, 64, 127),  # here they would cost more
        (False, 1.5, 31, 256, 31),
        (False, 1.5, 150, 256, 127),  # in two steps, which together cost less than one with all of it
    ],
)
def test_what_rides_costs_the_decodes_as_little_as_possible(
    late: bool, ratio: float, append: int, left: int | None, tokens: int
) -> None:
    policy = DecodeFirst(H200(late), list(H200_STEP_MS), 8192)
    step = view(target_ratio=ratio, append_tokens=append, steps_left=left)
    assert policy.grant(step).tokens == tokens


def test_a_size_that_was_once_too_slow_is_tried_again() -> None:
    engine = launching_gpu()
    for _ in range(16):
        engine.prices.learn(64, 0, 0.05, "beside")  # a machine that slept, for long
    ridden = [engine.decode(append_context=12000, decode_work=12000.0)[0].tokens for _ in range(1500)]
    assert max(ridden[:200]) < 63
    assert max(ridden[-200:]) >= 63


@given(
    ratio=st.floats(1.0, 3.0),
    target_ms=st.none() | st.floats(0.001, 50),
    tokens=st.integers(1, 3000),
    decodes=st.integers(0, 40),
    finalizes=st.booleans(),
    graphs=st.booleans(),
    seen=st.booleans(),
)
def test_no_append_starves(
    ratio: float, target_ms: float | None, tokens: int, decodes: int, finalizes: bool, graphs: bool, seen: bool
) -> None:
    """In any PATIENCE + 1 steps with appends waiting, one computes some of them."""
    engine = gpu() if graphs else cpu()
    if seen:
        prefill(engine)
        engine.take(max(1, decodes), 1000.0 * decodes, "decodes")
    granted = 0
    for starved in range(PATIENCE + 1):
        seen_view = view(
            target_ratio=ratio,
            target_ms=target_ms,
            append_tokens=tokens,
            decodes=decodes,
            decode_work=1000.0 * decodes,
            finalizes_wait=finalizes,
            starved_steps=starved,
        )
        grant = engine.policy.grant(seen_view)
        assert 0 <= grant.tokens <= min(tokens, MAX_TOKENS - decodes)
        granted = grant.tokens
        if granted:
            break
    assert granted > 0


def test_a_starved_append_gets_little_where_the_target_bears_nothing() -> None:
    engine = cpu(noise=0.0)
    prefill(engine)
    engine.take(1, 1000, "decodes")
    assert engine.policy.grant(view(target_ratio=1.0, starved_steps=PATIENCE)) == Grant(LEAST_TOKENS, "starved")


def test_the_step_without_appends_is_measured_again_and_again() -> None:
    engine = gpu()
    prefill(engine)
    engine.take(1, 1000, "decodes")
    reasons = [engine.decode()[0].reason for _ in range(3 * MEASURE + 3)]
    assert reasons.count("measuring") == 3


def test_a_machine_that_became_faster_is_not_slowed_by_old_prices() -> None:
    engine = cpu(noise=0.0)
    prefill(engine)
    for _ in range(100):
        engine.decode()
    engine._step, engine._row = engine._step / 2, engine._row / 2
    for _ in range(2000):
        engine.decode()
    multiples = [engine.decode()[1] for _ in range(100)]
    assert max(multiples) <= 1.3 * 1.05


def test_no_step_passes_the_largest_graph() -> None:
    engine = gpu(noise=0.0)
    for tokens in (16, 256, 2048):
        engine.take(tokens, 0, "beside")
        engine.take(tokens, 0, "prompts")
    engine.take(3, 3000, "decodes")
    assert engine.policy.grant(view(decodes=3, decode_work=3000.0, target_ratio=1000.0)).tokens == 509


@pytest.mark.parametrize("decodes", [512, 600, MAX_TOKENS])
def test_beyond_the_largest_graph_any_size_goes(decodes: int) -> None:
    engine = gpu(noise=0.0)
    prefill(engine)
    engine.take(decodes, 1000.0 * decodes, "decodes")
    grant = engine.policy.grant(view(decodes=decodes, decode_work=1000.0 * decodes))
    assert grant.tokens <= MAX_TOKENS - decodes


def test_beyond_the_largest_graph_few_sizes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gpu(noise=0.0)
    for tokens in (600, 1200, 2048):
        engine.take(tokens, 0, "beside")
        engine.take(tokens, 0, "prompts")
    engine.take(512, 512_000, "decodes")
    asked: list[int] = []
    price = engine.prices.price

    def counted(rows: int, work: float, kind: StepKind) -> float:
        asked.append(rows)
        return price(rows, work, kind)

    monkeypatch.setattr(engine.prices, "price", counted)
    assert engine.policy.grant(view(decodes=512, decode_work=512_000.0, target_ratio=3.0)).tokens > 0
    assert len(asked) < 60
