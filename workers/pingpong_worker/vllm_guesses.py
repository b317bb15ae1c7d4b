"""Puts guessed tokens into a vLLM scheduler's decodes, and keeps account of how they did.

vLLM's own speculative methods guess in the model's process, by settings that hold for every request of the engine, and
those that guess on the CPU cost it its planning ahead. Here the scheduler guesses, before a step: it knows each
request's prompt, output and mark, and both of vLLM's loops take what stands in `request.spec_token_ids` as tokens to be
checked. vLLM runs without a speculative configuration, so that steps without guesses are what they are without us;
`vllm_draft_runner.py` makes its model runner check them.

An engine that plans a step ahead does not know the last token when it schedules. While it guesses it waits: a step that
finds results outstanding is empty, and the engine takes the next result. Where guessing does not pay nothing waits.

One object for each scheduler; only requests with the mark `DRAFTS` are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pingpong_worker.draft_matcher import DraftMatcher, GuessOdds
from pingpong_worker.draft_policy import StepTimes, lengths
from pingpong_worker.vllm_guessing import COUNTS
from pingpong_worker.vllm_marks import DRAFT_TOKENS, DRAFTS, ITL_RATIO, KEY, is_append, mark_of
from pingpong_worker.vllm_step import prefills

_USUAL_RATIO: Final = 1.2
_BEGINNINGS: Final = 2
"""Answers that are begun to be guessed for in a step: to sort a prompt of some thousand tokens takes a millisecond."""
_LOOKS: Final = 16
"""Answers that a copy is looked for after a step; of more each has its turn, so that the step is not kept waiting."""


@dataclass
class _Guessed:
    """One request that tokens may be guessed for."""

    request: Any
    matcher: DraftMatcher
    most: int
    """Tokens that may be guessed for a step."""
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    guess: list[int] = field(default_factory=list)
    """For the step that is being scheduled."""

    def take(self, drafted: int, *, look: bool = True) -> None:
        """A step's result is in, for which so many tokens were guessed; `look`: see `DraftMatcher.extend`."""
        new = list(self.request.output_token_ids[self.matcher.written :])
        self.drafted += drafted
        if new:
            accepted = min(drafted, len(new) - 1)
            self.accepted += accepted
            self.steps += len(new) - accepted
            self.matcher.extend(new, look=look)

    @property
    def counts(self) -> dict[str, int]:
        return {"steps": self.steps, "drafted": self.drafted, "accepted": self.accepted}


class Guesses:
    """The guesses of one scheduler.

    Args:
        ahead: whether it plans a step before the last one's result is in.
        on_cores: whether the engine computes on CPU cores.
    """

    def __init__(self, *, ahead: bool, on_cores: bool) -> None:
        self._ahead = ahead
        self._times = StepTimes(ahead=ahead, on_cores=on_cores)
        self._odds = GuessOdds()
        self._known: dict[str, _Guessed] = {}
        self._out: list[Any] = []
        """Outputs of steps with guesses whose results are not in."""
        self._waits = False
        self._has_waited = False
        """Whether it did so since the last step that was not empty."""
        self._late: list[Any] = []
        """Outputs of plain steps that were planned after such a wait, not ahead: no measure of plain ones."""
        self._looked = 0
        """Of many, the one whose turn it is to have a copy looked for."""
        self._ended = -math.inf
        self._last_was_decodes = False

    @property
    def waits(self) -> bool:
        """Whether the step that was asked for last has to wait for results, and so is empty."""
        return self._waits

    def prepare(self, running: Sequence[Any], requests: Mapping[str, Any]) -> bool:
        """Guess for the next step.

        Args:
            running: the scheduler's running requests.
            requests: all that it has, by id.

        Returns:
            Whether it has to wait for results: the step is to be empty.
        """
        self._waits = self._prepare(running, requests)
        self._has_waited = self._has_waited or self._waits
        return self._waits

    def _prepare(self, running: Sequence[Any], requests: Mapping[str, Any]) -> bool:
        marked = [one for one in running if DRAFTS in mark_of(one.sampling_params)]
        if not marked and not self._known:
            return False
        decodes = [one for one in running if _decodes(one)]
        guessed = self._states(one for one in marked if _decodes(one))
        if len(self._known) > len(marked):  # some were aborted, or wait after they were pre-empted
            self._known = {name: state for name, state in self._known.items() if requests.get(name) is state.request}
        if self._out:
            return True
        chosen = self._choose(guessed, decodes)
        if any(chosen) and any(one.num_output_placeholders for one in running):
            return True
        for state, tokens in zip(guessed, chosen, strict=True):
            state.guess = state.guess[:tokens]
            state.request.spec_token_ids = list(state.guess)
        return False

    def scheduled(self, output: Any) -> None:
        """A step was scheduled; its `SchedulerOutput`."""
        if output.scheduled_spec_decode_tokens:
            self._out.append(output)
        elif self._has_waited and output.total_num_scheduled_tokens > 0:
            self._late.append(output)
        self._has_waited = False

    def ended(self, output: Any, results: Any, now: float) -> None:
        """A step's result was taken in.

        Args:
            output: its `SchedulerOutput`.
            results: what `update_from_output` gives, by client; what is known of guesses is added.
            now: in seconds.
        """
        guessed: Mapping[str, Sequence[int]] = output.scheduled_spec_decode_tokens
        self._learn_time(output, guessed, now)
        if guessed:
            self._out = [one for one in self._out if one is not output]
        if not self._known:
            return
        names = [name for name in output.num_scheduled_tokens if name in self._known]
        first = self._looked if len(names) > _LOOKS else 0
        self._looked = (first + _LOOKS) % max(1, len(names))
        for at, name in enumerate(names):
            self._known[name].take(len(guessed.get(name, ())), look=(at - first) % len(names) < _LOOKS)
        for client in results.values() if results else ():
            for result in client.outputs:
                if (state := self._known.get(result.request_id)) is not None:
                    result.kv_transfer_params = {**(result.kv_transfer_params or {}), KEY: {COUNTS: state.counts}}
                    if result.finish_reason is not None:
                        del self._known[result.request_id]

    def _states(self, requests: Iterable[Any]) -> list[_Guessed]:
        """Of those that are followed; of the others the first two are, from now on."""
        found: list[_Guessed] = []
        begun = 0
        for request in requests:
            state = self._known.get(request.request_id)
            if state is None or state.request is not request:
                if begun == _BEGINNINGS:
                    continue
                begun += 1
                state = self._known[request.request_id] = self._begin(request)
            found.append(state)
        return found

    def _begin(self, request: Any) -> _Guessed:
        mark = mark_of(request.sampling_params)
        matcher = DraftMatcher(request.prompt_token_ids or (), mark[DRAFTS], self._odds)
        state = _Guessed(request, matcher, int(mark.get(DRAFT_TOKENS, 0)))
        state.take(0, look=False)
        return state

    def _choose(self, guessed: Sequence[_Guessed], decodes: Sequence[Any]) -> list[int]:
        chances: list[list[float]] = []
        for state in guessed:
            request = state.request
            # One token comes without a guess. What is outstanding has to be what was expected, for a guess behind it to
            # be right; of itself it is no gain.
            outstanding = int(request.num_output_placeholders)
            left = min(state.most, int(request.max_tokens - request.num_output_tokens) - outstanding - 1)
            ids, likely = state.matcher.guess(outstanding + left) if left > 0 else ([], [])
            state.guess = ids[outstanding:]
            chances.append(likely[outstanding:])
        if not any(chances):
            return [0] * len(chances)
        alone = {state.request.request_id for state in guessed if state.guess}
        others = [mark_of(one.sampling_params) for one in decodes if one.request_id not in alone]
        most_ratio = min((mark.get(ITL_RATIO, _USUAL_RATIO) for mark in others), default=math.inf)
        return lengths(self._times, chances, len(decodes), most_ratio)

    def _learn_time(self, output: Any, guessed: Mapping[str, Sequence[int]], now: float) -> None:
        """What steps of decodes alone take, from result to result."""
        tokens = sum(map(len, guessed.values()))
        requests = len(output.num_scheduled_tokens)
        total = output.total_num_scheduled_tokens
        if total == 0:
            return  # a step that waited
        is_decodes = total == requests + tokens and not output.scheduled_new_reqs
        is_late = any(one is output for one in self._late)
        if is_late:
            self._late = [one for one in self._late if one is not output]
        if is_decodes and self._last_was_decodes and not is_late:
            self._times.learn(now - self._ended, requests, tokens)
        self._ended, self._last_was_decodes = now, is_decodes


def _decodes(request: Any) -> bool:
    """Whether a running request writes an answer, with all of its prompt computed or being computed."""
    computed = request.num_computed_tokens - request.num_output_placeholders
    return not is_append(request) and not prefills(request, computed)
