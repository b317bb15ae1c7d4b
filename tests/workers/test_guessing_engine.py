"""The real engine with guesses: the same tokens in fewer steps, whatever the guesses are worth."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from pingpong_bus.messages import DraftCounts, Sampling
from pingpong_worker.vllm_draft_runner import for_each_token
from pingpong_worker.vllm_engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPT = [(index * 6007 + 29) % 40000 + 100 for index in range(150)]
GREEDY = Sampling(max_tokens=40, ignore_eos=True)
_ids = itertools.count()


@pytest_asyncio.fixture(loop_scope="session")
async def _cold_cache(vllm_engine: VllmEngine) -> AsyncIterator[None]:
    yield
    await vllm_engine.reset_prefix_cache()


class Answer:
    """Of one session."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.outputs = 0
        self.finish_reason: str | None = None
        self.stop_token: int | None = None
        self.drafts: DraftCounts | None = None


async def ask(
    engine: VllmEngine,
    drafts: Sequence[Sequence[int]] | None = None,
    *,
    prompt: Sequence[int] = PROMPT,
    sampling: Sampling = GREEDY,
    cuts: Sequence[int] = (),
    grid: int | None = None,
) -> Answer:
    session = engine.open(f"guess-{next(_ids)}", cache_salt=None, sampling=sampling, drafts=drafts, grid=grid)
    for start, end in itertools.pairwise([0, *cuts]):
        await session.append(prompt[start:end])
    answer = Answer()
    async for output in session.finalize(prompt[cuts[-1] if cuts else 0 :], sampling):
        answer.ids += output.ids
        answer.outputs += 1
        answer.finish_reason, answer.stop_token = output.finish_reason, output.stop_token
        answer.drafts = output.drafts or answer.drafts
    return answer


def spoiled(run: Sequence[int]) -> list[int]:
    """Every seventh token is another one."""
    return [token + 1 if at % 7 == 3 else token for at, token in enumerate(run)]


@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.asyncio(loop_scope="session")
async def test_guesses_change_no_token_and_save_steps(vllm_engine: VllmEngine) -> None:
    assert vllm_engine.limits.speculation == "chain"
    plain = await ask(vllm_engine)
    assert plain.drafts is None
    for drafts in ([], [plain.ids], [spoiled(plain.ids)], [[5] * 40, plain.ids], [plain.ids[10:]]):
        answer = await ask(vllm_engine, drafts)
        assert (answer.ids, answer.finish_reason) == (plain.ids, "length")
        assert answer.drafts is not None
        assert answer.drafts.steps + answer.drafts.accepted == len(plain.ids)
        assert answer.drafts.accepted <= answer.drafts.drafted
    known = await ask(vllm_engine, [plain.ids])
    assert known.drafts is not None
    assert known.drafts.steps <= 12
    assert known.drafts.accepted == known.drafts.drafted
    assert known.outputs <= known.drafts.steps


@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.asyncio(loop_scope="session")
async def test_guesses_beside_appends_prompts_and_other_answers(vllm_engine: VllmEngine) -> None:
    other = PROMPT[::-1]
    plain, expected = await ask(vllm_engine), await ask(vllm_engine, prompt=other)
    answers = await asyncio.gather(
        ask(vllm_engine, [plain.ids], cuts=(40, 100)),
        ask(vllm_engine, prompt=other),
        ask(vllm_engine, [spoiled(expected.ids)], prompt=other, cuts=(64,)),
        ask(vllm_engine, [plain.ids]),
    )
    assert [answer.ids for answer in answers] == [plain.ids, expected.ids, expected.ids, plain.ids]


@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.asyncio(loop_scope="session")
async def test_a_stop_token_within_a_guess_ends_the_answer(vllm_engine: VllmEngine) -> None:
    plain = await ask(vllm_engine)
    for at in (9, 13, 22):
        stop = plain.ids[at]
        sampling = Sampling(max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
        answer = await ask(vllm_engine, [plain.ids], sampling=sampling)
        first = plain.ids.index(stop)
        assert (answer.ids, answer.finish_reason, answer.stop_token) == (plain.ids[:first], "stop", stop)


@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.asyncio(loop_scope="session")
async def test_seeds_and_grids_are_as_without_guesses(vllm_engine: VllmEngine) -> None:
    seeded = Sampling(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    plain = await ask(vllm_engine, sampling=seeded)
    again = await ask(vllm_engine, [plain.ids], sampling=seeded)
    assert (again.ids, again.drafts) == (plain.ids, None)
    cell = vllm_engine.limits.grid_tokens
    assert cell, vllm_engine.limits.grid_refusal
    on_grid = await ask(vllm_engine, [plain.ids], grid=cell)
    assert on_grid.drafts is None


@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.asyncio(loop_scope="session")
async def test_sampled_answers_end_and_say_how_it_went(vllm_engine: VllmEngine) -> None:
    plain = await ask(vllm_engine)
    sampled = await ask(vllm_engine, [plain.ids], sampling=Sampling(max_tokens=20, temperature=0.01, ignore_eos=True))
    assert sampled.ids == plain.ids[:20], "so cold that it is greedy"
    assert sampled.drafts is not None
    assert sampled.drafts.accepted > 5


def test_guesses_keep_the_distribution_of_sampled_tokens() -> None:
    """vLLM's rejection sampling on a CPU, with our values for each token: as often as the model says.

    Requests have one to three guesses, always of the same token, and temperatures of their own.
    """
    import torch
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()  # what vLLM does in an engine's processes on CPUs
    from vllm.v1.sample import rejection_sampler

    generator = torch.Generator().manual_seed(1)
    words, requests = 12, 6000
    model = torch.randn(words, generator=generator) * 1.5
    counts = [1 + at % 3 for at in range(requests)]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    temperature = torch.tensor([0.6 if at % 2 else 1.4 for at in range(requests)])
    metadata: Any = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=temperature, top_k=None, top_p=None, generators={}
    )
    torch.manual_seed(2)
    with mock.patch.object(rejection_sampler, "expand_batch_to_tokens", for_each_token):
        logits = rejection_sampler.apply_sampling_constraints(model.repeat(sum(counts), 1), ends, metadata)
        drawn = rejection_sampler.rejection_sample(
            torch.full((sum(counts),), 4, dtype=torch.int32),
            counts,
            max(counts),
            ends,
            None,
            logits,
            torch.zeros(requests, 1, dtype=torch.int32),
            metadata,
        )
    for odd, heat in ((0, 1.4), (1, 0.6)):
        shares = torch.bincount(drawn[odd::2, 0].long(), minlength=words) / (requests / 2)
        chances = torch.softmax(model / heat, 0)
        assert (shares - chances).abs().max() < 4 * math.sqrt(0.25 / (requests / 2))
