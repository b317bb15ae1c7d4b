"""Counts what an engine gives, and says how long its next output may take.

An engine is judged by its work: a worker whose event loop answers may sit before an engine that stands still. The
meter knows what is in flight, and learns two times from what came before: how long a decoding request waits for its
next token, and how long a token of a prompt takes to prefill. Both go up fast and come down slowly, for the question is
how long an output *may* take; and no single outlier counts for more than four times what was known, for one of them
can be a machine that slept.

It also counts how long each token was waited for (`token_waits.py`), by what else was in flight in that time: an append
or a prompt that was, if only for a part of it, may be why. Of one that was aborted the engine's running step still
computes a part, so it counts for one token more.

Pure: whoever uses it says what time it is, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pingpong_bus.messages import StepCounts, StepKind
from pingpong_worker.token_waits import TokenWaits

_UNKNOWN_STEP_S = 2.0
_UNKNOWN_PREFILL_S = 0.01
"""Per token, before anything was learnt: 100 tokens a second, a slow CPU's pace."""
_RISE, _FALL = 0.5, 0.02
_OUTLIER = 4.0
_ENOUGH_TOKENS = 64
"""Prefills below say more of a step than of a token."""
_SAME_STEP_S = 0.0005
"""Outputs of one step come one after the other; those of two are further apart."""


class _Pace:
    """A time that is learnt from samples: quickly upwards, slowly downwards."""

    def __init__(self, unknown_s: float) -> None:
        self.seconds = unknown_s
        self._known = False

    def learn(self, sample_s: float) -> None:
        if not self._known:
            self.seconds, self._known = min(sample_s, _OUTLIER * self.seconds), True
            return
        sample_s = min(sample_s, _OUTLIER * self.seconds)
        self.seconds += (_RISE if sample_s > self.seconds else _FALL) * (sample_s - self.seconds)

    def learn_if_slower(self, sample_s: float) -> None:
        if sample_s > self.seconds:
            self.learn(sample_s)


@dataclass(slots=True, eq=False)
class Submission:
    """One piece of work that the engine holds: an append, or a prompt's end and its answer."""

    tokens: int
    """Prompt tokens that it has not computed, as far as known; all of them until its first output."""
    waiting_since: float
    """When its latest output came, or its submission."""
    waited_since: float
    """The same of the output before."""
    is_append: bool
    context: int
    """Tokens of its prompt and its answer so far."""
    left: int | None = None
    """Of these tokens, those that an engine which reports progress has not computed."""
    answered: bool = False
    """Whether an output has come."""
    alone: bool = True
    """Whether no other submission had an output since it was made."""
    decodes: int = 0
    """Answers that were being decoded when its latest output came."""


@dataclass(slots=True)
class _Prefills:
    """Submissions of one kind that have had no output, and when there last was one."""

    in_flight: int = 0
    answered: float = -math.inf
    """When one had its output."""
    given_up: float = -math.inf
    """When one was ended before it."""

    def overlap(self, answer: Submission) -> bool:
        """Whether one was in flight while this answer waited for the output that comes now."""
        return (
            self.in_flight > 0
            or self.answered > answer.waiting_since + _SAME_STEP_S
            or self.given_up > answer.waited_since
        )


@dataclass(slots=True)
class _Answers:
    """Answers that are being decoded: those that have had an output."""

    in_flight: int = 0
    context: int = 0
    waits: TokenWaits = field(default_factory=TokenWaits)


class StepMeter:
    """Meters one engine.

    Attributes:
        steps: outputs since the start: tokens, appends that were computed, and parts of prompts where the engine tells.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._in_flight: set[Submission] = set()
        self._appends, self._prompts, self._answers = _Prefills(), _Prefills(), _Answers()
        self._step = _Pace(_UNKNOWN_STEP_S)
        self._prefill = _Pace(_UNKNOWN_PREFILL_S)

    @property
    def waiting(self) -> int:
        """Submissions that the engine has not answered in full."""
        return len(self._in_flight)

    @property
    def predicted_step_ms(self) -> float:
        """How long the next output may take; 0 where nothing is in flight.

        Prefills under way count with all their tokens: an engine may compute all of them before it gives anything.
        """
        if not self._in_flight:
            return 0.0
        tokens = sum(each.tokens if each.left is None else each.left for each in self._in_flight)
        return 1e3 * (self._step.seconds + tokens * self._prefill.seconds)

    def submitted(self, tokens: int, now: float, *, is_append: bool = False, context: int = 0) -> Submission:
        """The engine was given work.

        Args:
            tokens: of its prompt, to be computed.
            now: the time in seconds.
            is_append: whether nobody waits for an answer.
            context: the prompt's tokens, those that were computed before among them.
        """
        submission = Submission(tokens, now, now, is_append, context)
        self._in_flight.add(submission)
        self._prefills(submission).in_flight += 1
        return submission

    def progressed(self, submission: Submission, left: int) -> None:
        """A step has computed a part of a prompt, of which `left` tokens are to come. That is work done, too."""
        if submission in self._in_flight and not submission.answered:
            self.steps += 1
            submission.left = min(left, submission.tokens)

    def output(
        self,
        submission: Submission,
        now: float,
        *,
        tokens: int = 1,
        steps: int | None = None,
        computed: int | None = None,
    ) -> None:
        """Something has come back.

        Args:
            submission: whose output it is.
            now: the time in seconds.
            tokens: how many tokens it has; one without any is progress all the same.
            steps: how many steps of the engine gave them, where its tokens are guessed: a wait for several of one step
                is one wait, and no shorter one than another's. None: as many as there are tokens.
            computed: with a first output, the prompt tokens that had to be computed for it; None where it is not
                known how many were found in a prefix cache.
        """
        self.steps += max(1, tokens)
        waited_s = now - submission.waiting_since
        if submission.tokens == 0:
            self._step.learn(waited_s)
        elif submission.alone:  # else it shared the engine, and waited for its turn
            known = submission.tokens if computed is None else computed
            if known >= _ENOUGH_TOKENS:
                learn = self._prefill.learn_if_slower if computed is None else self._prefill.learn
                learn(waited_s / known)
        submission.tokens, submission.left = 0, None
        if not submission.is_append and submission.answered:
            self._count(submission, waited_s * 1e3, max(1, tokens if steps is None else steps))
        self._note(submission, now, tokens)
        for other in self._in_flight:
            if other is not submission:
                other.alone = False

    def ended(self, submission: Submission, now: float) -> None:
        """The engine holds it no more, whatever became of it; a second call does nothing."""
        if submission not in self._in_flight:
            return
        self._in_flight.remove(submission)
        if not submission.answered:
            prefills = self._prefills(submission)
            prefills.in_flight -= 1
            prefills.given_up = now
        elif not submission.is_append:
            self._answers.in_flight -= 1
            self._answers.context -= submission.context

    def take_counts(self) -> list[StepCounts]:
        """How long answers have waited for their tokens since the last call."""
        return self._answers.waits.take()

    def _prefills(self, submission: Submission) -> _Prefills:
        return self._appends if submission.is_append else self._prompts

    def _count(self, answer: Submission, waited_ms: float, tokens: int) -> None:
        kind: StepKind = "decode"
        if self._prompts.overlap(answer):
            kind = "prompts"
        elif self._appends.overlap(answer):
            kind = "appends"
        # Of one that has ended meanwhile, the step that ended it was waited for too.
        decodes = max(self._answers.in_flight, answer.decodes)
        self._answers.waits.add(kind, decodes, self._answers.context, waited_ms, tokens)

    def _note(self, submission: Submission, now: float, tokens: int) -> None:
        """Take an output into account for those that come."""
        answers = self._answers
        if not submission.answered:
            submission.answered = True
            prefills = self._prefills(submission)
            prefills.in_flight -= 1
            prefills.answered = now
            if not submission.is_append:
                answers.in_flight += 1
                answers.context += submission.context
        if not submission.is_append:
            submission.context += tokens
            answers.context += tokens
        submission.waited_since, submission.waiting_since = submission.waiting_since, now
        submission.decodes = answers.in_flight
