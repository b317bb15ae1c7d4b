"""Makes vLLM's model runners check tokens that our scheduler has guessed (`vllm_guesses.py`), in the model's process.

vLLM runs without a speculative configuration: one would make every step one with guesses (from 0.32 on), capture CUDA
graphs for steps with guesses in place of those for plain decodes, and refuse features to requests that nothing is
guessed for. Its runners can check guesses all the same; what they lack is a rejection sampler, and room for the ids:

- V1 (CPUs; some models on GPUs in 0.24): the batch is prepared with guesses where `speculative_config` is set, from
  0.32 on; so it is set while a batch with guesses is prepared, and only then. Where steps are planned ahead the sampled
  ids are expected to be one for each request: the next step finds none of these requests in it, since the scheduler
  waits, and reads its ids from what the scheduler sends; the others have one.
- V2 (most models on GPUs): guesses stand in a tensor on the device, which a proposer would have written. Its sampler
  asks the proposer for the guesses' probabilities; there are none, a guess is certain.

What is relied on is looked up by `faults`, before the engine starts.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from pingpong_worker.vllm_marks import GUESS_VARIABLE

_STANDARD: Final = "standard"
"""vLLM's name of rejection sampling that keeps the distribution."""


def guessed_tokens() -> int:
    """The most tokens that are guessed for a request in a step of this engine; 0: none."""
    return int(os.environ.get(GUESS_VARIABLE) or 0)


def check_guesses(runner: Any, tokens: int) -> None:
    """Prepare a model runner that has loaded its model.

    Args:
        runner: of either kind.
        tokens: the most that are guessed for a request in a step.
    """
    if tokens <= 0:
        return
    if hasattr(runner, "req_states"):
        _prepare_v2(runner, tokens)
    else:
        _prepare_v1(runner, tokens)


def _settings(tokens: int) -> SimpleNamespace:
    """What a rejection sampler reads of a speculative configuration."""
    return SimpleNamespace(
        num_speculative_tokens=tokens, rejection_sample_method=_STANDARD, enable_adaptive_verification=False
    )


@contextmanager
def _with(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _prepare_v1(runner: Any, tokens: int) -> None:
    from vllm.v1.sample import rejection_sampler

    if runner.device.type == "cpu":
        rejection_sampler.expand_batch_to_tokens = for_each_token
    runner.rejection_sampler = rejection_sampler.RejectionSampler(runner.sampler, _settings(tokens), runner.device)
    settings, prepare, keep_books = _settings(tokens), runner._prepare_inputs, runner._bookkeeping_sync

    def prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.scheduled_spec_decode_tokens:
            return prepare(scheduler_output, *args, **kwargs)
        with _with(runner, "speculative_config", settings):
            return prepare(scheduler_output, *args, **kwargs)

    def bookkeeping_sync(scheduler_output: Any, sampler_output: Any, *args: Any, **kwargs: Any) -> Any:
        sampled = sampler_output.sampled_token_ids
        if runner.use_async_scheduling and sampled.shape[-1] > 1:
            runner.input_batch.prev_sampled_token_ids = sampled[:, :1].contiguous()
        return keep_books(scheduler_output, sampler_output, *args, **kwargs)

    runner._prepare_inputs = prepare_inputs
    runner._bookkeeping_sync = bookkeeping_sync


def for_each_token(values: Any, ends: Any, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """What vLLM's `expand_batch_to_tokens` does: the value of each request, for each of its tokens.

    On CPUs vLLM (0.24 to 0.32) computes that into a copy and gives back memory that nobody has written: temperatures
    of sampled requests then are whatever stood there, and so is their output.

    Args:
        values: one for each request.
        ends: for each request, the number of tokens up to its end.
        tokens: of all.
        replace_from: a value that stands for another one.
        replace_to: that one.
    """
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return torch.repeat_interleave(replaced, counts, output_size=tokens)


def _prepare_v2(runner: Any, tokens: int) -> None:
    import torch
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    states = runner.req_states
    states.draft_tokens = torch.zeros(
        states.draft_tokens.shape[0], tokens, dtype=states.draft_tokens.dtype, device=states.draft_tokens.device
    )
    if runner.is_last_pp_rank:
        runner.rejection_sampler = RejectionSampler(runner.sampler, _settings(tokens), runner.device)
    certain = SimpleNamespace(draft_logits=None)
    pinned = runner.device.type == "cuda"
    prepare, sample = runner.prepare_inputs, runner.sample

    def prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        guesses = scheduler_output.scheduled_spec_decode_tokens
        if not guesses:
            return prepare(scheduler_output, *args, **kwargs)
        rows = [states.req_id_to_index[name] for name in guesses]
        padded = [[*ids, *([0] * (tokens - len(ids)))] for ids in guesses.values()]
        at = torch.tensor(rows, dtype=torch.int64, pin_memory=pinned).to(runner.device, non_blocking=True)
        ids = torch.tensor(padded, dtype=states.draft_tokens.dtype, pin_memory=pinned)
        states.draft_tokens[at] = ids.to(runner.device, non_blocking=True)
        with _with(runner, "decode_query_len", tokens + 1):
            return prepare(scheduler_output, *args, **kwargs)

    def sample_tokens(hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if input_batch.num_draft_tokens == 0:
            return sample(hidden_states, input_batch, *args, **kwargs)
        with _with(runner, "speculator", certain):
            return sample(hidden_states, input_batch, *args, **kwargs)

    runner.prepare_inputs = prepare_inputs
    runner.sample = sample_tokens


def faults(runner: type, scheduler: type) -> Iterator[str]:
    """What a version of vLLM lacks for guesses, as ends of sentences.

    Args:
        runner: its model runner's class, V1 or V2.
        scheduler: its scheduler's class.
    """
    is_v2 = hasattr(runner, "prepare_inputs")
    prepare = getattr(runner, "prepare_inputs" if is_v2 else "_prepare_inputs", None)
    sample = getattr(runner, "sample" if is_v2 else "_sample", None)
    if prepare is None or sample is None or not (is_v2 or hasattr(runner, "_bookkeeping_sync")):
        yield "its model runner prepares and samples steps in another way"
        return
    if list(inspect.signature(prepare).parameters)[1:2] != ["scheduler_output"]:
        yield "its model runner prepares batches from something else"
    if "scheduled_spec_decode_tokens" not in inspect.getsource(prepare):
        yield "its model runner does not look for guesses where it prepares a batch"
    source = inspect.getsource(sample)
    if "self.rejection_sampler(" not in source or (is_v2 and "self.speculator.draft_logits" not in source):
        yield "its model runner checks guesses in another way"
    if is_v2 and list(inspect.signature(prepare).parameters)[1:] != ["scheduler_output", "batch_desc"]:
        yield "its model runner V2 was not tried with guesses"
    schedule, update = inspect.getsource(scheduler.schedule), inspect.getsource(scheduler.update_from_output)  # type: ignore[attr-defined]
    if "request.num_tokens_with_spec" not in schedule or "request.spec_token_ids" not in schedule:
        yield "its scheduler takes no guesses from requests"
    if "token_budget > 0" not in schedule:
        yield "its scheduler cannot be given a step of nothing"
    if "num_rejected" not in update:
        yield "its scheduler does not take back what was rejected"
