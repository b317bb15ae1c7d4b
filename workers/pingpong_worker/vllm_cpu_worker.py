"""vLLM's CPU worker, with seeded sampling that does not depend on how a prompt was cut, and log probabilities at once.

In the V1 model runner (every CPU build without Triton) all rows of a step are sampled, also those whose prompt is not
through yet; their tokens are thrown away. A row with a seed has drawn from its generator by then, and the runner takes
the draw back with ``generator.set_offset(generator.get_offset() - 4)``. A CPU generator has no offset: the call raises
and the engine dies, as soon as a seeded prompt is longer than what is left of a step's budget.

Here such rows have no generator while their step is sampled: nothing is drawn, and nothing has to be taken back. No
setting does the same: a budget as large as the longest prompt still splits the second of two prompts that share a step.

The first request for log probabilities makes vLLM compile the function that counts a token's rank: up to 10 s in which
no step ends, and the engine's end where there is no C++ compiler. It runs uncompiled here; it is called for such
requests only.

vLLM builds the class from the engine argument `worker_cls`, which is meant for this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm.v1.sample import sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from pingpong_worker.start_progress import START_PROGRESS
from pingpong_worker.vllm_draft_runner import check_guesses, guessed_tokens
from pingpong_worker.vllm_start_progress import tell_stages

_COUNT_RANKS = "batched_count_greater_than"


class SeededCPUWorker(CPUWorker):  # type: ignore[misc]
    """A CPU worker whose seeded requests may be prefilled in any number of steps, and that scores without compiling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        count_ranks_uncompiled(sampler)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and prepare its runner for guesses, where there are to be any."""
        super().load_model(*args, **kwargs)
        check_guesses(self.model_runner, guessed_tokens())

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the step that `execute_model` has computed."""
        with unfinished_prompts_unseeded(self.model_runner):
            return super().sample_tokens(grammar_output)


if path := os.environ.get(START_PROGRESS):
    tell_stages(SeededCPUWorker, Path(path))


def count_ranks_uncompiled(module: ModuleType) -> None:
    """Replace `batched_count_greater_than` in `vllm.v1.sample.sampler` by what it was compiled from."""
    compiled = getattr(module, _COUNT_RANKS, None)
    original = getattr(compiled, "_torchdynamo_orig_callable", None)
    if original is not None:
        setattr(module, _COUNT_RANKS, original)


@contextmanager
def unfinished_prompts_unseeded(runner: Any) -> Iterator[None]:
    """Take the generators of rows whose sample will be thrown away out of the batch, and put them back after."""
    mask = getattr(runner, "discard_request_mask", None)
    if getattr(runner, "splits_seeded_prompts", False):  # it does the same itself: see `vllm_abilities.py`
        mask = None
    if mask is None:  # The V2 runner derives its noise from seed and position: nothing is drawn in vain.
        yield
        return
    batch = runner.input_batch
    generators = batch.generators
    held = {row: generators.pop(row) for row in list(generators) if row < batch.num_reqs and mask.np[row]}
    try:
        yield
    finally:
        generators.update(held)
