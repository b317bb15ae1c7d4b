"""Guesses how an answer goes on, from what it may repeat: earlier runs of its agent, its prompt, and itself.

The longest end of what was written that stands in one of them says where the copy is, and what follows there is the
guess. While the answer keeps to the copy nothing is looked for: the place moves along. Before its first token an answer
is taken to begin as the latest earlier run did.

How often a guess is right hangs on how long the match is, and on whether it is a run or the prompt. That is learnt
token by token (`GuessOdds`), also where nothing was guessed: every token that comes says whether the copy would have
been right. So guessing can stop where it does not pay, and start again when it would, without trying it.

Pure; memory is that of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pingpong_worker.draft_index import LONGEST, GrowingPairs, Ids, PairIndex

Source = Literal["run", "prompt", "answer"]
_SOURCES: Final[tuple[Source, ...]] = ("run", "prompt", "answer")

_ENDS: Final = (0, 1, 2, 3, 5, 8, 16, LONGEST)
"""Longest matches of the buckets that odds are kept in; 0 is the beginning of a run."""
_PRIOR: Final[dict[Source, tuple[float, ...]]] = {
    "run": (0.5, 0.7, 0.55, 0.65, 0.75, 0.85, 0.92, 0.97),  # a match of one token has begun as the run did
    "prompt": (0.1, 0.1, 0.25, 0.4, 0.6, 0.8, 0.9, 0.96),
    "answer": (0.1, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95),
}
_PRIOR_WEIGHT: Final = 6.0
"""Tokens that what is known from others counts for."""
_MEMORY: Final = 48.0
"""Tokens that the odds of a bucket go back."""


class GuessOdds:
    """How often the next token of a copy was right, by source and length of the match.

    Args:
        usual: odds of other answers, to begin with; None: what is usual anywhere.
    """

    def __init__(self, usual: GuessOdds | None = None) -> None:
        self._usual = usual
        self._right = {source: [0.0] * len(_ENDS) for source in _SOURCES}
        self._all = {source: [0.0] * len(_ENDS) for source in _SOURCES}

    def learn(self, source: Source, length: int, right: bool) -> None:
        """The token behind a match of this length was, or was not, the one that came."""
        if self._usual is not None:
            self._usual.learn(source, length, right)
        at = _bucket(length)
        keep = 1 - 1 / _MEMORY
        self._right[source][at] = keep * self._right[source][at] + right
        self._all[source][at] = keep * self._all[source][at] + 1

    def share(self, source: Source, length: int) -> float:
        """The chance that the token behind such a match is right."""
        at = _bucket(length)
        prior = _PRIOR[source][at] if self._usual is None else self._usual.share(source, length)
        return (self._right[source][at] + _PRIOR_WEIGHT * prior) / (self._all[source][at] + _PRIOR_WEIGHT)

    def chances(self, source: Source, length: int, tokens: int) -> list[float]:
        """For each of so many tokens behind a match, the chance that all up to it are right."""
        found: list[float] = []
        chance = 1.0
        for ahead in range(tokens):
            chance *= self.share(source, length + ahead)
            found.append(chance)
        return found


def _bucket(length: int) -> int:
    return next((at for at, end in enumerate(_ENDS) if length <= end), len(_ENDS) - 1)


@dataclass
class _Place:
    """Where the answer is in a copy."""

    source: Source
    text: int
    """Which one, of the runs; 0 of the others."""
    at: int
    """The position of what should come next."""
    length: int
    """Tokens that match before it; `LONGEST` for that many or more."""


class DraftMatcher:
    """Follows one answer.

    Args:
        prompt: its prompt's ids.
        runs: what the same agent wrote before, the latest first.
        usual: odds of other answers.
    """

    def __init__(self, prompt: Sequence[int], runs: Sequence[Sequence[int]], usual: GuessOdds | None = None) -> None:
        self.odds = GuessOdds(usual)
        self._prompt = PairIndex(prompt)
        self._runs = [PairIndex(run) for run in runs if len(run) > 0]
        self._answer = GrowingPairs()
        self._place = _Place("run", 0, 0, 0) if self._runs else None
        self._last: dict[tuple[Source, int], int] = {}
        """Where the answer last was in each text."""

    @property
    def written(self) -> int:
        """Tokens of the answer that it was told of."""
        return len(self._answer.ids)

    def extend(self, ids: Sequence[int], *, look: bool = True) -> None:
        """The answer goes on.

        Args:
            ids: its next tokens.
            look: whether another copy is looked for where it leaves the one that it kept to: some 0.1 ms a token.
        """
        for token in ids:
            self._step(token, look)

    def guess(self, tokens: int) -> tuple[list[int], list[float]]:
        """What should come next.

        Args:
            tokens: the most that are wanted.

        Returns:
            The ids, and for each the chance that all up to it are right.
        """
        place = self._place
        if place is None or tokens <= 0:
            return [], []
        text = self._text(place)
        ids = [int(token) for token in text[place.at : place.at + tokens]]
        while place.source == "answer" and len(ids) < tokens:  # what repeats itself goes on repeating
            ids.append(ids[len(ids) - (len(text) - place.at)])
        return ids, self.odds.chances(place.source, place.length, len(ids))

    def _step(self, token: int, look: bool) -> None:
        self._answer.extend((token,))
        place = self._place
        if place is not None:
            text = self._text(place)
            right = place.at < len(text) and int(text[place.at]) == token
            if place.at < len(text):
                self.odds.learn(place.source, place.length, right)
            if right:
                place.at += 1
                place.length = min(place.length + 1, LONGEST)
                self._last[place.source, place.text] = place.at
                if place.at < len(text):
                    return
        self._place = self._find() if look else None

    def _find(self) -> _Place | None:
        """The best place of all texts: the one whose next token is most likely right."""
        recent = self._answer.ids[-LONGEST:]
        places: list[_Place] = []
        for number, run in enumerate(self._runs):
            length, found = run.longest(recent)
            if length:
                places.append(_Place("run", number, self._nearest("run", number, found), length))
        if len(recent) < LONGEST:  # the answer may go on with what the prompt ends with, across the seam
            before = [int(token) for token in self._prompt.ids[len(recent) - LONGEST :]]
            recent = before + recent
        length, found = self._prompt.longest(recent)
        if length:
            places.append(_Place("prompt", 0, self._nearest("prompt", 0, found), length))
        length, own = self._answer.longest()
        if length:
            places.append(_Place("answer", 0, own[-1], length))
        return max(places, key=lambda one: self.odds.share(one.source, one.length), default=None)

    def _nearest(self, source: Source, text: int, found: Sequence[int] | Ids) -> int:
        """Of places that match alike, the next behind where the answer was: copies go forward; else the latest."""
        last = self._last.get((source, text), 0)
        return int(next((place for place in found if place >= last), found[-1]))

    def _text(self, place: _Place) -> Sequence[int]:
        if place.source == "run":
            return self._runs[place.text].ids  # type: ignore[return-value]
        return self._prompt.ids if place.source == "prompt" else self._answer.ids  # type: ignore[return-value]
