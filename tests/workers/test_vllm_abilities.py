"""What patches give an engine: how it is noticed, and what changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from patched_vllm import installed_vllm, make_copy
from pingpong_bus.messages import EngineLimits, Sampling
from pingpong_worker.engine import OutputTokens, TellsProgress
from pingpong_worker.metered_session import MeteredSession
from pingpong_worker.step_meter import StepMeter
from pingpong_worker.vllm_abilities import MARKS, abilities_of
from pingpong_worker.vllm_guards import Reservations, session_kind
from pingpong_worker.vllm_handle import Handling, VllmHandle
from pingpong_worker.vllm_sessions import PrefixCacheSession, StreamingInputSession
from pingpongd.patch_folder import load_series, shipped, versions

ALL = tuple(MARKS)


class FakeLlm:
    """An `AsyncLLM` with scripted outputs; of a session it gives them once all of its input has come."""

    errored = False

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs
        self.asked: list[Any] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.asked.append(params)
        if hasattr(prompt, "__anext__"):
            async for _, given in prompt:
                self.asked.append(given)
        for output in self._outputs:
            await asyncio.sleep(0)
            yield output

    async def abort(self, request_id: str) -> None:
        """Nothing runs for long."""


def output(ids: list[int], reason: str | None = None, computed: int | None = None, cached: int = 0) -> Any:
    completion = SimpleNamespace(token_ids=list(ids), finish_reason=reason, stop_reason=None)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached, num_computed_tokens=computed)


def handle(llm: FakeLlm, abilities: tuple[str, ...] = ALL) -> VllmHandle:
    limits = EngineLimits(
        engine="fake", model="m", max_model_len=100, vocabulary_size=50, block_size=4, kv_tokens=400, max_num_seqs=4
    )
    return VllmHandle(
        llm=llm,
        limits=msgspec.structs.replace(limits, abilities=abilities),
        end_ids=frozenset({2}),
        make_prompt=lambda ids, salt: {"ids": list(ids), "salt": salt},
        make_params=lambda **given: given,
        make_chunk=lambda prompt, params: (prompt, params),
        refusals=(ValueError,),
    )


def test_every_patch_announces_an_ability_that_we_know() -> None:
    for version in versions(shipped()):
        announced = [name for patch in load_series(shipped(), version).patches for name in patch.abilities]
        assert set(announced) <= set(ALL)
        assert len(announced) == len(set(announced)) == len(load_series(shipped(), version).patches)


def test_the_lines_by_which_patches_announce_themselves_are_in_them() -> None:
    for version in versions(shipped()):
        for patch in load_series(shipped(), version).patches:
            file, line = MARKS[patch.abilities[0]]
            added = [
                each
                for diff in patch.files
                if diff.path == f"vllm/{file}"
                for hunk in diff.hunks
                for each in hunk.after
            ]
            assert f"{line.strip()}\n".encode() in [text.lstrip() for text in added], patch.name


def test_a_patched_copy_has_its_abilities_and_the_installed_one_is_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    package, version = installed_vllm()
    before = abilities_of([package])
    copy = make_copy(tmp_path / "all")
    expected = {name for patch in load_series(shipped(), version).patches for name in patch.abilities}
    assert set(abilities_of([copy / "vllm"])) == expected
    one = make_copy(tmp_path / "one", ["die-with-parent"])
    assert abilities_of([one / "vllm"]) == ("die-with-parent",)
    assert abilities_of([package]) == before


def test_where_there_is_no_vllm_there_are_none(tmp_path: Path) -> None:
    assert abilities_of([]) == ()
    assert abilities_of([tmp_path]) == ()


def test_sampled_agents_may_be_fed_where_appends_sample_nothing() -> None:
    sampled = Sampling(max_tokens=1, temperature=0.7)
    assert session_kind("streaming-input", sampled) == "prefix-cache"
    assert session_kind("streaming-input", sampled, appends_sample=False) == "streaming-input"
    assert session_kind("streaming-input", sampled, 256, appends_sample=False) == "prefix-cache", "off the grid"
    assert session_kind("streaming-input", sampled, guessed=True, appends_sample=False) == "prefix-cache"


def test_sessions_that_give_way_need_seats_only() -> None:
    def taken(give_way: bool) -> int:
        reservations = Reservations(kv_tokens=400, max_model_len=100, block_size=4, max_num_seqs=16, give_way=give_way)
        return sum(reservations.take(str(number)) for number in range(20))

    assert taken(False) == 3, "four fit at full length, and one is left for a request beside them"
    assert taken(True) == 8, "half of the seats"


def test_appends_ask_for_what_the_engine_can() -> None:
    marks = {"extra_args": Handling().marks(append=True), "temperature": 0.0}
    assert handle(FakeLlm([]), ()).append_params(Handling()) == {"max_tokens": 1, **marks}
    assert handle(FakeLlm([])).append_params(Handling()) == {"max_tokens": 0, "prefill_progress": True, **marks}
    assert handle(FakeLlm([])).answer_params(Handling(), Sampling(max_tokens=3))["prefill_progress"] is True
    assert "prefill_progress" not in handle(FakeLlm([]), ()).answer_params(Handling(), Sampling(max_tokens=3))


async def test_progress_is_work_and_shortens_what_is_predicted() -> None:
    llm = FakeLlm([output([], computed=20), output([], computed=60), output([], "length", computed=80, cached=10)])
    session = PrefixCacheSession(handle(llm), "s", Handling(), lambda: None)
    assert isinstance(session, TellsProgress)
    meter = StepMeter()
    seen: list[tuple[int, float]] = []
    metered = MeteredSession(session, meter)
    told = session.on_computed
    session.on_computed = lambda tokens: (told(tokens), seen.append((meter.steps, meter.predicted_step_ms)))
    assert await metered.append([1] * 80) == 70
    steps, predicted = zip(*seen, strict=True)
    assert steps == (1, 2, 3)
    assert predicted[0] > predicted[1] > predicted[2]
    assert meter.steps == 4
    assert meter.predicted_step_ms == 0


async def test_an_answer_gives_no_word_of_progress_on() -> None:
    llm = FakeLlm([output([], computed=2), output([7], computed=3, cached=1), output([8], "length", computed=3)])
    session = PrefixCacheSession(handle(llm), "s", Handling(), lambda: None)
    heard: list[int] = []
    session.on_computed = heard.append
    answer = [item async for item in session.finalize([4, 5, 6], Sampling(max_tokens=2))]
    assert answer == [OutputTokens([7], None, None, 1), OutputTokens([8], "length")]
    assert heard == [2, 3]


@pytest.mark.parametrize("merged", [False, True])
async def test_the_end_of_a_cancelled_append_is_not_the_answers(merged: bool) -> None:
    """An append that samples nothing ends with no token; its end may come together with the answer's first token."""
    ends = [output([], "length", computed=2, cached=1)]
    llm = FakeLlm([*([] if merged else ends), output([7], computed=3, cached=1), output([8], "length", computed=3)])
    session = StreamingInputSession(handle(llm), "s", Handling(), lambda: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.append([1, 2]), 0.01)
    answer = [item async for item in session.finalize([3], Sampling(max_tokens=2, temperature=0.5))]
    assert answer == [OutputTokens([7], None, None, 1), OutputTokens([8], "length")]
    assert [params["max_tokens"] for params in llm.asked] == [0, 0, 2]
