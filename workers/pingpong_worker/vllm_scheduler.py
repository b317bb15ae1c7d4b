"""vLLM's schedulers, made to put decodes first, to cut prompts on a grid, and mended where a version has faults.

Which class an engine gets is said in `vllm_versions.py`; the engine's process imports this file by name. What is relied
on in vLLM is checked by `vllm_scheduler_checks.py` before the engine starts. Nothing of vLLM's scheduling is copied:
`schedule()` runs as it is, on queues that are put in order before and restored after.

A step, in `DecodeFirstSteps.schedule`:

1. The policy (`decode_first.py`) grants appends a number of tokens. They are counted down in the hook that vLLM has for
   models with Mamba layers, which both of its loops, over running and over waiting requests, ask for every prompt.
2. `running` is sorted: decodes, prompts whose answer is waited for, appends. So appends get what the others leave of
   the step, and are what is pre-empted first.
3. A 0 from the hook ends the loop over waiting requests. So appends that are to get nothing leave their queues for the
   length of the call, and so does every waiting append where another prompt waits.

A prompt that waits holds appends back, unless it could not be admitted although the step had room: memory or seats are
short then, appends may be what holds them, and so these go on for a step before it is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pingpong_worker.decode_first import PATIENCE, Grant, StepView
from pingpong_worker.step_board import BoardWriter
from pingpong_worker.step_ledger import PlannedStep, StepLedger
from pingpong_worker.step_prices import StepKind, attention_work
from pingpong_worker.vllm_grid import cell_tokens, grid_of, hold_cache_to_grid
from pingpong_worker.vllm_guesses import Guesses
from pingpong_worker.vllm_marks import is_append
from pingpong_worker.vllm_retention import hold_prefixes, share_from_environment
from pingpong_worker.vllm_step import QUEUES, StepContent, look, prefills, urgency

_log = logging.getLogger("pingpong_worker")

PASSED_OVER = 2 * PATIENCE
"""Steps after which an append that got nothing, while others did, has one for itself."""


class SessionFixes:
    """Mixin: what the next chunk of a session must change in its request, and an old vLLM leaves.

    - A chunk's `max_tokens` never reached the request, so the last chunk, which decodes, gave as many tokens as the
      first, an append: one (vllm-project/vllm#37842).
    - The sampled token that is thrown away at a chunk's end may have filled a block. Its hash stayed, and the block's
      real content was later found under the wrong hash (vllm-project/vllm#49449).
    """

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        block_size = getattr(self, "hash_block_size", None) or self.block_size  # type: ignore[attr-defined]
        del session.block_hashes[session.num_computed_tokens // block_size :]
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        session.max_tokens = update.max_tokens


class DecodeFirstSteps:
    """Mixin: holds appends to a budget beside decodes, and prompts with a grid to their cells."""

    _clock = staticmethod(time.perf_counter)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        # After vLLM's own __init__, which derives settings for Mamba layers from it.
        self._mamba_splits = bool(scheduler.need_mamba_block_aligned_split)
        self.need_mamba_block_aligned_split = True
        hold_cache_to_grid(scheduler.kv_cache_manager)
        limit = scheduler.scheduler_config.long_prefill_token_threshold or scheduler.max_num_scheduled_tokens
        self._longest_chunk = min(limit, scheduler.max_num_scheduled_tokens)
        """The most tokens that a prompt may get in a step."""
        self._ledger = StepLedger(
            graph_sizes(scheduler.vllm_config),
            scheduler.max_num_scheduled_tokens,
            BoardWriter.open_from_environment(),
        )
        self._kept = hold_prefixes(
            scheduler.kv_cache_manager, share_from_environment(), self._longest_chunk, self._ledger.prompt_seconds
        )
        self._guesses = Guesses(ahead=isinstance(self, AsyncScheduler), on_cores=on_cores(scheduler.vllm_config))
        self._budget = 0
        """Append tokens left in the step that is being scheduled."""
        self._favoured: Any = None
        """The append that has the step for itself, having got nothing for long."""
        self._starved_steps = 0
        self._unserved: dict[str, int] = {}
        """Steps in which an append got nothing, by request id."""
        self._kept_out: set[str] = set()
        """Prompts that could not be admitted though the step had room."""
        self._cell_did_not_fit = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """See `Scheduler.schedule`."""
        scheduler: Any = self
        begun = self._clock()
        if self._guesses.prepare(scheduler.running, scheduler.requests):
            return self._empty_step(*args, **kwargs)
        queues = [getattr(scheduler, name) for name in QUEUES if hasattr(scheduler, name)]
        content = look(scheduler.running, queues)
        waiting = [one for one in content.waiting_prompts if one.request_id not in self._kept_out]
        view = content.view(finalizes_wait=bool(content.prompts or waiting), starved_steps=self._starved_steps)
        grant = self._ledger.policy.grant(view)
        self._budget, self._cell_did_not_fit = grant.tokens, False
        self._favoured = self._choose_favoured(content, grant)
        scheduler.running.sort(key=lambda request: urgency(request, self._favoured))
        aside = [pair for pair in content.waiting_appends if not self._may_be_admitted(pair[1], content)]
        for queue, request in aside:
            queue.remove_request(request)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for queue, request in aside:
                queue.add_request(request)
        self._note(content, waiting, output)
        self._guesses.scheduled(output)
        if output.total_num_scheduled_tokens > 0:
            self._ledger.plan(self._planned(content, output, begun, view, grant))
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Scheduler.update_from_output`."""
        scheduler: Any = self
        ended = self._clock()
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self._guesses.ended(scheduler_output, outputs, ended)
        # Now, for what has ended has let go of its blocks. A version without this figure need not be refused for it.
        usage = getattr(scheduler.kv_cache_manager, "usage", 0.0)
        self._ledger.end(scheduler_output, ended, usage, self._kept.share if self._kept is not None else 0.0)
        return outputs

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's statistics count by a configured number of guesses, and there is none: the requests' own say it."""

    def _empty_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step of nothing, after which the engine waits for a result."""
        scheduler: Any = self
        limit, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 0
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            scheduler.max_num_scheduled_tokens = limit

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        *more: Any,
        **named: Any,
    ) -> int:
        """How many of `num_new_tokens` the request may compute in this step; 0: none."""
        hits = num_new_local_computed_tokens, num_external_computed_tokens
        start = request.num_computed_tokens + sum(hits)
        if not prefills(request, start):
            return num_new_tokens
        if not is_append(request):
            return self._aligned(request, num_new_tokens, start, *hits, *more, **named)
        if self._favoured not in (None, request):
            return 0
        tokens = self._aligned(request, min(num_new_tokens, self._budget), start, *hits, *more, **named)
        if tokens == 0 and request is self._favoured:  # it takes more than was granted to get anywhere
            tokens = self._aligned(request, num_new_tokens, start, *hits, *more, **named)
        self._budget = max(0, self._budget - tokens)
        return tokens

    def _aligned(self, request: Any, tokens: int, start: int, *hits: Any, **named: Any) -> int:
        """`tokens`, cut where the request's grid or the model's layers want it; 0 where they are too few for that."""
        if tokens <= 0:
            return 0
        if grid := grid_of(request):
            cell = cell_tokens(start, request.num_tokens, grid)
            if tokens >= cell:
                return cell
            if grid <= self._longest_chunk:
                self._cell_did_not_fit = True
                return 0
            _log.error("a cell of %d tokens does not fit in a step: the prompt is cut anywhere", grid)
        if self._mamba_splits:
            return int(super()._mamba_block_aligned_split(request, tokens, *hits, **named))  # type: ignore[misc]
        return tokens

    def _choose_favoured(self, content: StepContent, grant: Grant) -> Any:
        """The append that has waited longest, where it has waited too long."""
        if grant.tokens == 0 or grant.reason == "full speed":
            return None
        longest = max(content.all_appends, key=lambda one: self._unserved.get(one.request_id, 0))
        if grant.reason != "starved" and self._unserved.get(longest.request_id, 0) < PASSED_OVER:
            return None
        self._unserved[longest.request_id] = 0
        return longest

    def _may_be_admitted(self, append: Any, content: StepContent) -> bool:
        """Whether a waiting append stays in its queue for this step."""
        if self._budget == 0:
            return False
        if self._favoured is not None:
            return append is self._favoured
        # One that holds KV goes first in vLLM too: what waits for memory may wait for it.
        return not content.waiting_prompts or append.num_computed_tokens > 0

    def _note(self, content: StepContent, waiting: list[Any], output: Any) -> None:
        """Count who got nothing, and which prompts could not be admitted."""
        scheduler: Any = self
        scheduled = output.num_scheduled_tokens
        unserved = {
            one.request_id: self._unserved.get(one.request_id, 0) + 1
            for one in content.all_appends
            if one.request_id not in scheduled
        }
        served = len(unserved) < len(content.appends) + len(content.waiting_appends)
        self._starved_steps = 0 if served or not unserved else self._starved_steps + 1
        self._unserved = unserved
        room = output.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens
        self._kept_out = set()
        if waiting and room and not output.preempted_req_ids and not self._cell_did_not_fit:
            self._kept_out = {one.request_id for one in content.waiting_prompts if one.request_id not in scheduled}

    def _planned(self, content: StepContent, output: Any, begun: float, view: StepView, grant: Grant) -> PlannedStep:
        scheduler: Any = self
        scheduled = output.num_scheduled_tokens
        decodes = {request.request_id for request in content.decodes}
        appends = {request.request_id for request in content.all_appends}
        return PlannedStep(
            output=output,
            begun=begun,
            rows=output.total_num_scheduled_tokens,
            # What is computed was counted by vLLM as soon as it was scheduled.
            work=sum(
                attention_work(scheduler.requests[name].num_computed_tokens - tokens, tokens)
                for name, tokens in scheduled.items()
            ),
            kind=_kind(scheduled.keys(), decodes),
            append_tokens=sum(tokens for name, tokens in scheduled.items() if name in appends),
            admits=bool(output.scheduled_new_reqs),
            view=view,
            grant=grant,
        )


def _kind(scheduled: Set[str], decodes: set[str]) -> StepKind:
    """What a step holds, by the ids of its requests and of those that decode."""
    if scheduled <= decodes:
        return "decodes"
    return "prompts" if scheduled.isdisjoint(decodes) else "beside"


def graph_sizes(vllm_config: Any) -> list[int]:
    """Rows that the engine has graphs for, for steps that hold prompts; empty where it has none."""
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode.mixed_mode().name == "NONE":
        return []
    return sorted(compilation.cudagraph_capture_sizes or ())


def on_cores(vllm_config: Any) -> bool:
    """Whether the engine computes on CPU cores."""
    return str(vllm_config.device_config.device_type) == "cpu"


class SessionScheduler(SessionFixes, Scheduler):  # type: ignore[misc]
    """For engines that schedule one step at a time: CPUs."""


class AsyncSessionScheduler(SessionFixes, AsyncScheduler):  # type: ignore[misc]
    """For engines that plan a step before the last one's result is in: GPUs."""


class DecodeFirstScheduler(DecodeFirstSteps, SessionFixes, Scheduler):  # type: ignore[misc]
    """Decodes first, for engines that schedule one step at a time."""


class AsyncDecodeFirstScheduler(DecodeFirstSteps, SessionFixes, AsyncScheduler):  # type: ignore[misc]
    """Decodes first, for engines that plan ahead."""
