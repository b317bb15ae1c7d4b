"""Text that is joined ahead, on a real engine: what comes out is what comes out of series."""

from __future__ import annotations

import asyncio

import pytest

from pingpong_bus.messages import HopAppended, HopFinalized, OutputSource, Sampling
from pingpong_bus.token_log import TokenLogReader
from pingpong_worker.incremental_tokens import GrowingIds, PieceByPiece
from pingpong_worker.model_store import EMBEDDED_MODEL, resolve_model
from pingpong_worker.prompt import Prompts
from pingpong_worker.vllm_engine import VllmEngine
from seam_stage import Stage, ended, parts, seam_stage

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

WRITTEN = (
    "<think>The user wants tips, so I list some.</think>\n\n1. Water them in the morning -- it's cooler, and they've "
    "more time to drink. 2. Gießt nicht über die Blätter! 3. 早上浇水 🪴👩‍🌾 is best. 4. Use 0.5 to 1.25 litres a day."
)
STATIC = "You write short reviews. Be honest, name numbers, and quote. " * 12


class Hasty(Prompts):
    """Commits whatever ids there are, which later text changes."""

    def growing(self, *, control: bool, first: bool = False) -> GrowingIds:
        if control:
            return super().growing(control=True, first=first)
        return PieceByPiece(self.encode_text)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts.load(resolve_model(EMBEDDED_MODEL))


async def answer_of(
    engine: VllmEngine, codec: Prompts, *, ahead: bool, salt: str
) -> tuple[list[int], list[int], Stage]:
    """The ids of the answer, of the prompt, and the stage that they came to be on."""
    own = Prompts.load(resolve_model(EMBEDDED_MODEL))
    ids = own.encode_text(WRITTEN)
    async with seam_stage(engine) as stage:
        stage.prompts = codec
        joined = stage.joined(parts(STATIC, 0, "\n\nReview this."), sources={0: OutputSource(strip="think")})
        sampling = Sampling(max_tokens=24, ignore_eos=True)
        feed = stage.feed(joined, sampling=sampling, cache_salt=salt)
        if ahead:
            task = asyncio.create_task(feed.run())
            for at in range(0, len(ids), 3):
                stage.write(0, ids[at : at + 3])
                await asyncio.sleep(0.02)
            stage.close(0)
        else:
            stage.write(0, ids)
            stage.close(0)
            task = asyncio.create_task(feed.run())
        async with asyncio.timeout(120):
            while not task.done():
                await asyncio.wait([task], timeout=1)
        end = await ended(task)
        assert end.state == "finished", end.message
        stage.messages.append(end)
        expected = own.join(joined, {0: WRITTEN.partition("</think>\n\n")[2]})
        (finalized,) = stage.of(HopFinalized)
        assert isinstance(finalized, HopFinalized)
        assert finalized.prompt_tokens == len(expected)
        return TokenLogReader(stage.slab, stage.output).read().ids, expected, stage


async def test_text_read_ahead_gives_the_answer_of_series(vllm_engine: VllmEngine, prompts: Prompts) -> None:
    series, _, quiet = await answer_of(vllm_engine, prompts, ahead=False, salt="seam series")
    ahead, _, busy = await answer_of(vllm_engine, prompts, ahead=True, salt="seam ahead")
    assert not quiet.of(HopAppended)
    appended = busy.of(HopAppended)
    assert len(appended) >= 2, "the static text, and some of the output"
    assert ahead == series
    assert busy.messages[-1].seam.rollbacks == 0  # type: ignore[union-attr]


async def test_what_is_taken_back_leaves_nothing_in_the_answer(vllm_engine: VllmEngine, prompts: Prompts) -> None:
    hasty = Hasty.load(resolve_model(EMBEDDED_MODEL))
    series, _, _ = await answer_of(vllm_engine, prompts, ahead=False, salt="seam right")
    ahead, _, stage = await answer_of(vllm_engine, hasty, ahead=True, salt="seam wrong")
    end = stage.messages[-1]
    assert end.seam.rollbacks == 1  # type: ignore[union-attr]
    assert end.seam.tokens > 0  # type: ignore[union-attr]
    assert ahead == series
