"""Counts what an engine gives, and says how long its next output may take.

An engine is judged by its work: a worker whose event loop answers may sit before an engine that stands still. The
meter knows what is in flight, and learns two times from what came before: how long a decoding request waits for its
next token, and how long a token of a prompt takes to prefill. Both go up fast and come down slowly, for the question is
how long an output *may* take; and no single outlier counts for more than four times what was known, for one of them
can be a machine that slept.

Pure: whoever uses it says what time it is, in seconds.
"""

from __future__ import annotations

_UNKNOWN_STEP_S = 2.0
_UNKNOWN_PREFILL_S = 0.01
"""Per token, before anything was learnt: 100 tokens a second, a slow CPU's pace."""
_RISE, _FALL = 0.5, 0.02
_OUTLIER = 4.0
_ENOUGH_TOKENS = 64
"""Prefills below say more of a step than of a token."""


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


class Submission:
    """One piece of work that the engine holds: an append, or a prompt's end and its answer."""

    __slots__ = ("alone", "tokens", "waiting_since")

    def __init__(self, tokens: int, now: float) -> None:
        self.tokens = tokens
        """Prompt tokens that it has not computed, as far as known; all of them until its first output."""
        self.waiting_since = now
        """When its latest output came, or its submission."""
        self.alone = True
        """Whether no other submission had an output since it was made."""


class StepMeter:
    """Meters one engine.

    Attributes:
        steps: outputs since the start: tokens, and appends that were computed.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._in_flight: set[Submission] = set()
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
        tokens = sum(submission.tokens for submission in self._in_flight)
        return 1e3 * (self._step.seconds + tokens * self._prefill.seconds)

    def submitted(self, tokens: int, now: float) -> Submission:
        """The engine was given work with `tokens` prompt tokens to compute."""
        submission = Submission(tokens, now)
        self._in_flight.add(submission)
        return submission

    def output(self, submission: Submission, now: float, *, tokens: int = 1, computed: int | None = None) -> None:
        """Something has come back.

        Args:
            submission: whose output it is.
            now: the time in seconds.
            tokens: how many tokens it has; one without any is progress all the same.
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
        submission.tokens = 0
        submission.waiting_since = now
        for other in self._in_flight:
            if other is not submission:
                other.alone = False

    def ended(self, submission: Submission) -> None:
        """The engine holds it no more, whatever became of it."""
        self._in_flight.discard(submission)
