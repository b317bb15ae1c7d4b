"""What a vLLM scheduler holds as a step begins, sorted by who waits for it: decodes, prompts of answers, appends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pingpong_bus.messages import DecodePace
from pingpong_worker.decode_first import StepView
from pingpong_worker.step_prices import attention_work
from pingpong_worker.vllm_marks import ITL_RATIO, ITL_TARGET_MS, is_append, mark_of

QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")
"""Where requests wait that do not run, by vLLM's names: all versions have the first, and one of the others."""
READY = frozenset({"WAITING", "PREEMPTED"})
"""Names of the statuses in which a request could be scheduled at once."""


@dataclass
class StepContent:
    """The requests that the next step may be made of."""

    decodes: list[Any] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    """Running requests whose prompt is not computed, and that are no appends."""
    waiting_prompts: list[Any] = field(default_factory=list)
    """The same, not yet admitted."""
    appends: list[Any] = field(default_factory=list)
    """Running ones with tokens left to compute."""
    waiting_appends: list[tuple[Any, Any]] = field(default_factory=list)
    """The queue, and the append that could be admitted from it."""

    @property
    def append_tokens(self) -> int:
        """Tokens of all appends; of those not admitted, as if the prefix cache held nothing."""
        return sum(map(left_tokens, self.all_appends))

    @cached_property
    def all_appends(self) -> list[Any]:
        """Those that run, then those that wait; for when all are known."""
        return [*self.appends, *(append for _, append in self.waiting_appends)]

    def view(self, *, finalizes_wait: bool, starved_steps: int) -> StepView:
        """The step as `decode_first.py` sees it."""
        marks = [mark_of(request.sampling_params) for request in self.decodes]
        first = next(iter(self.all_appends), None)
        return StepView(
            decodes=sum(map(rows_of, self.decodes)),
            decode_work=sum(attention_work(request.num_computed_tokens, rows_of(request)) for request in self.decodes),
            target_ratio=min((mark.get(ITL_RATIO, _RATIO) for mark in marks), default=_RATIO),
            target_ms=min((mark[ITL_TARGET_MS] for mark in marks if ITL_TARGET_MS in mark), default=None),
            append_tokens=self.append_tokens,
            # Of one that is not admitted, the prefix cache holds an unknown part, mostly nearly all: its end is a
            # cautious guess.
            append_context=(first.num_computed_tokens or first.num_tokens) if first is not None else 0,
            finalizes_wait=finalizes_wait,
            starved_steps=starved_steps,
            steps_left=min(map(steps_left, self.decodes), default=None),
        )


_RATIO = DecodePace().itl_ratio
"""Of decodes without a mark."""


def rows_of(request: Any) -> int:
    """Rows that a decoding request takes in a step: its token, and what speculation adds."""
    return 1 + len(request.spec_token_ids)


def steps_left(request: Any) -> int:
    """Steps that a decoding request may take until it has written all that it may."""
    return max(1, int(request.max_tokens - request.num_output_tokens))


def left_tokens(request: Any) -> int:
    """Known tokens that are not computed."""
    return max(0, int(request.num_tokens - request.num_computed_tokens))


def prefills(request: Any, start: int) -> bool:
    """Whether a request that is computed up to `start` computes known tokens; a pre-empted one does so with its own
    output again."""
    return start < max(int(request.num_prompt_tokens), int(request.num_tokens) - 1)


def look(running: Sequence[Any], queues: Sequence[Any]) -> StepContent:
    """Sort the requests of a scheduler.

    Args:
        running: its `running`.
        queues: where the others wait.
    """
    content = StepContent()
    for request in running:
        if is_append(request):
            if left_tokens(request):
                content.appends.append(request)
        elif prefills(request, request.num_computed_tokens):
            content.prompts.append(request)
        elif not _is_through(request):
            content.decodes.append(request)
    for queue in queues:
        for request in queue:
            if request.status.name not in READY:
                continue
            if is_append(request):
                content.waiting_appends.append((queue, request))
            else:
                content.waiting_prompts.append(request)
    return content


def urgency(request: Any, favoured: Any) -> int:
    """What `running` is sorted by: decodes, the append that has waited too long if any, prompts, appends."""
    if is_append(request):
        return 1 if request is favoured else 3
    return 2 if prefills(request, request.num_computed_tokens) else 0


def _is_through(request: Any) -> bool:
    """Whether the request's last token is being computed, where steps are planned ahead: it is not scheduled again."""
    ahead = request.num_output_placeholders
    return bool(ahead > 0 and request.num_computed_tokens + 2 - ahead >= request.num_prompt_tokens + request.max_tokens)
