"""Tokens to text as they come, and the end of an answer at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 3
"""Replacement characters that an unfinished character of UTF-8 can show as: one a byte, and its last is missing."""
_BATCH = 32
"""Tokens decoded at once; bounds the window that every later step decodes again."""
_LONGEST_WINDOW = 128
"""Tokens kept while the text never gets past replacement characters; without a bound, steps would cost ever more."""


class DecodeStream(Protocol):
    """Decodes one answer, piece by piece; special tokens give no text."""

    @property
    def pending(self) -> bool:
        """True while the last tokens may be part of a character that is not complete yet: their text is held back."""
        ...

    def step(self, ids: Sequence[int]) -> str:
        """The text that these further ids add."""
        ...

    def finish(self) -> str:
        """What was held back; the stream ends with it."""
        ...


class TextCodec(Protocol):
    """The two directions between text and ids."""

    def decode_stream(self) -> DecodeStream:
        """A stream for one answer, from its first token on."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text inside a prompt: no control tokens, whatever it says, and no BOS."""
        ...


def decode_all(stream: DecodeStream, ids: Sequence[int]) -> str:
    """The text of a whole answer, token by token: the same as where they came one by one."""
    return "".join([*(stream.step((token,)) for token in ids), stream.finish()])


class WindowDecodeStream:
    """A `DecodeStream` over any function from ids to text.

    It decodes a window of the last tokens with and without the new ones, for many decoders look at a token's
    neighbours (a leading space that is stripped, characters that span tokens). All pieces together are what decoding
    all ids at once gives. One exception: a decoder with byte fallback turns a run of byte tokens into replacement
    characters altogether when a later byte spoils it; here the characters that were complete by then stay.

    Args:
        decode: text of ids.
        silent: ids without text.
    """

    def __init__(self, decode: Callable[[list[int]], str], silent: frozenset[int]) -> None:
        self._decode = decode
        self._silent = silent
        self._window: list[int] = []
        self._context = 0
        """Tokens at the window's start whose text has been given."""
        self._given = 0
        """Characters of the window's text that have been given."""
        self._held = 0
        """Characters at the window's end that may still change."""

    @property
    def pending(self) -> bool:
        """See `DecodeStream`."""
        return self._held > 0

    def step(self, ids: Sequence[int]) -> str:
        """See `DecodeStream`."""
        spoken = [token for token in ids if token not in self._silent]
        return "".join(self._advance(spoken[at : at + _BATCH]) for at in range(0, len(spoken), _BATCH))

    def finish(self) -> str:
        """See `DecodeStream`."""
        text = self._decode(self._window)[self._given :] if self._held else ""
        self._window, self._context, self._given, self._held = [], 0, 0, 0
        return text

    def _advance(self, ids: list[int]) -> str:
        self._window += ids
        text = self._decode(self._window)
        self._held = len(text) - len(text.rstrip(_REPLACEMENT))
        overflow = self._held and len(self._window) > _LONGEST_WINDOW
        if overflow:
            self._held = min(self._held, _LONGEST_CHARACTER)
        end = len(text) - self._held
        new = text[self._given : end]
        if self._held and not overflow:
            self._given = max(self._given, end)
            return new
        self._window = self._window[-2 * (_LONGEST_CHARACTER + 1) :] if overflow else self._window[self._context :]
        self._context = len(self._window)
        self._given = max(0, len(self._decode(self._window)) - self._held)
        return new


class Committed(NamedTuple):
    """Tokens that will not be taken back."""

    ids: list[int]
    text: str
    """Their text."""
    stopped: bool
    """True once a stop string has ended the answer; the stop string itself is in neither."""


class StopMatcher:
    """Finds stop strings in an answer, and withholds tokens whose text might still become one.

    The stop string that is complete first counts; of several complete at the same character, the longest. Where it
    begins inside a token's text, what is left of that text is tokenized anew, so that ids and text agree; that
    depends on the answer's ids alone, not on how they were cut into calls.

    Args:
        stops: not empty strings; without any, everything passes at once.
        prompts: decodes, and tokenizes what is left of a token.
        max_tokens: where set, what is left of a token may take more ids than it had, up to this many in all;
            otherwise never more ids are committed than were fed. Text past that bound is cut off.
    """

    def __init__(self, stops: Sequence[str], prompts: TextCodec, *, max_tokens: int | None = None) -> None:
        self._codec = prompts
        self._stream = prompts.decode_stream()
        self._automata = [_StopAutomaton(stop) for stop in stops]
        self._room = max_tokens
        self._seen = 0
        """Characters of the answer so far; offsets below count from the answer's start."""
        self._ids: list[int] = []
        """Withheld."""
        self._ends: list[int] = []
        """For each withheld id, where its text ends; -1 in the middle of a character."""
        self._text = ""
        """Of the withheld ids."""
        self._start = 0
        """Where that text starts."""
        self._stopped = False

    def resume(self, ids: Sequence[int]) -> str:
        """Before anything is fed: go on behind `ids`, which an interrupted answer has committed; returns their text.

        They would have been withheld if a stop string could begin in them. So none is looked for there, even if their
        end looks like the beginning of one: what followed it was known when they were committed.
        """
        text = self._stream.step(ids)
        self._seen = self._start = len(text)
        if self._room is not None:
            self._room -= len(ids)
        return text

    def feed(self, ids: Sequence[int]) -> Committed:
        """Take the next ids of the answer; those that follow a stop string are thrown away."""
        if not self._automata:
            passed = list(ids)
            return Committed(passed, self._stream.step(passed), False)
        for token in () if self._stopped else ids:
            text = self._stream.step((token,))
            self._ids.append(token)
            self._text += text
            stop_at = self._scan(text)
            if stop_at is not None:
                return self._stop(stop_at)
            self._ends.append(-1 if self._stream.pending else self._seen)
        if self._stopped:
            return Committed([], "", True)
        return self._commit(*self._boundary(self._seen - max(automaton.matched for automaton in self._automata)))

    def finish(self) -> Committed:
        """The answer ended by itself: give what was withheld."""
        if self._stopped:
            return Committed([], "", True)
        text = self._stream.finish()
        if not self._automata:
            return Committed([], text, False)
        self._text += text
        stop_at = self._scan(text)
        if stop_at is not None:
            return self._stop(stop_at)
        return self._commit(len(self._ids), self._seen)

    def _scan(self, text: str) -> int | None:
        """Advance over the answer's next characters; where a stop string starts that is complete now."""
        for character in text:
            self._seen += 1
            longest = 0
            for automaton in self._automata:
                if automaton.advance(character):
                    longest = max(longest, automaton.matched)
            if longest:
                return self._seen - longest
        return None

    def _boundary(self, limit: int) -> tuple[int, int]:
        """How many withheld ids end, with a whole character, at `limit` or before, and where the last of them ends."""
        for at in range(len(self._ends) - 1, -1, -1):
            if 0 <= self._ends[at] <= limit:
                return at + 1, self._ends[at]
        return 0, self._start

    def _commit(self, count: int, end: int) -> Committed:
        ids, text = self._ids[:count], self._text[: end - self._start]
        del self._ids[:count], self._ends[:count]
        self._text = self._text[end - self._start :]
        self._start = end
        if self._room is not None:
            self._room -= count
        return Committed(ids, text, False)

    def _stop(self, stop_at: int) -> Committed:
        self._stopped = True
        ids, text, _ = self._commit(*self._boundary(stop_at))
        left = self._text[: stop_at - self._start]
        if left:
            anew = self._codec.encode_text(left)
            room = len(self._ids) if self._room is None else self._room
            if len(anew) > room:
                anew = anew[:room]
                stream = self._codec.decode_stream()
                left = stream.step(anew) + stream.finish()
            ids, text = ids + anew, text + left
        self._ids, self._ends, self._text = [], [], ""
        return Committed(ids, text, True)


class _StopAutomaton:
    """Knuth-Morris-Pratt: how much of a stop string the text's end matches, in constant time per character."""

    __slots__ = ("_fallback", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = [0] * len(stop)
        """For each length minus one of a matched prefix, the next shorter prefix that also ends it."""
        self.matched = 0
        """Characters of the stop string that the text ends with."""
        for at in range(1, len(stop)):
            self.advance(stop[at])
            self._fallback[at] = self.matched
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Take the next character; True where the stop string is complete. Then its work is done."""
        matched = self.matched
        while matched and self._stop[matched] != character:
            matched = self._fallback[matched - 1]
        if self._stop[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(self._stop)
