"""How far a regular expression looks: from where on its matches may still change when text is added. Pure.

A regular expression engine that tries to match at a position looks at one character after the other, along paths of
the expression's automaton. Once no path is left it has seen all that its outcome hangs on. So an attempt whose paths
have all ended before the text does comes out the same whatever follows, and one of which a path is alive at the text's
end may not. Lookaheads are paths that lead nowhere; what an engine leaves untried (possessive and lazy repeats, atomic
groups, the order of alternatives) only takes paths away.

Expressions are read as Oniguruma reads them, which `tokenizers` uses, and what a class of characters holds is asked of
it, for no two engines agree on all of Unicode. What looks behind itself or at the text's ends is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Reach", "RegexRefused"]

_MOST_COPIES = 64
"""Of a part that is repeated so many times at most; the automaton has a copy for each."""
_MOST_STEPS = 100_000
"""Remembered steps of the automaton, and characters."""
_CLASSES = frozenset("sSdDwWhH")
_CONTROLS = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_FOLDED = 3
"""As many characters may fold to one, or one to as many, where case does not matter."""
_ANY = ""
"""The class of all characters."""


class RegexRefused(ValueError):
    """The expression has something of which it is not known how far it looks."""


@dataclass(frozen=True)
class _Chars:
    """One character: `source` is a class as the engine reads it, or `literal` the character itself."""

    source: str
    literal: bool = False


@dataclass(frozen=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Choice:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


@dataclass(frozen=True)
class _Look:
    part: _Node


_Node = _Chars | _Sequence | _Choice | _Repeat | _Look


class Reach:
    """One expression.

    Args:
        pattern: the expression, or with `literal` a text that stands for itself.
        member: whether a class, as the engine reads it, holds a character.
        literal: see `pattern`.

    Raises:
        RegexRefused: it cannot be said how far it looks, or it may match nothing.
    """

    def __init__(self, pattern: str, member: Callable[[str, str], bool], *, literal: bool = False) -> None:
        self._member = member
        node = _Sequence(tuple(_Chars(letter, True) for letter in pattern)) if literal else _Parser(pattern).parse()
        self._empty: list[list[int]] = []
        """For each state, those that are reached without a character."""
        self._step: list[tuple[_Chars, int] | None] = []
        """For each state, the characters that lead on from it, and where to."""
        accept, dead = self._state(), self._state()
        self._dead = dead
        start = self._build(node, accept)
        if accept in self._closure(start):
            raise RegexRefused("it matches nothing, too.")
        steps = [state for state, step in enumerate(self._step) if step is not None]
        bit = {state: 1 << at for at, state in enumerate(steps)}
        self._chars = [step[0] for state in steps if (step := self._step[state]) is not None]
        self._next = [self._mask(step[1], bit) for state in steps if (step := self._step[state]) is not None]
        self._first = self._mask(start, bit)
        self._all = (1 << len(steps)) - 1
        self._holding: dict[str, int] = {}
        """For each character, which steps take it."""
        self._before: dict[tuple[int, int], int] = {}

    def limit(self, text: str, end: int) -> int:
        """The first position from which an attempt to match may still come out otherwise when what stands at `end`
        and behind it changes; at most `end`. Takes time for the part behind it only."""
        alive, limit = self._all, end
        for at in range(end - 1, -1, -1):
            alive = self._back(self._steps_taking(text[at]), alive)
            if not alive:
                break
            if alive & self._first:
                limit = at
        return limit

    def _back(self, taking: int, alive: int) -> int:
        """The steps whose paths survive, given those that do one character later."""
        key = (taking, alive)
        found = self._before.get(key)
        if found is None:
            found = 0
            for at, after in enumerate(self._next):
                if taking >> at & 1 and after & alive:
                    found |= 1 << at
            if len(self._before) >= _MOST_STEPS:
                self._before.clear()
            self._before[key] = found
        return found

    def _steps_taking(self, letter: str) -> int:
        taking = self._holding.get(letter)
        if taking is None:
            taking = 0
            for at, chars in enumerate(self._chars):
                if self._takes(chars, letter):
                    taking |= 1 << at
            if len(self._holding) >= _MOST_STEPS:
                self._holding.clear()
            self._holding[letter] = taking
        return taking

    def _takes(self, chars: _Chars, letter: str) -> bool:
        if chars.literal:
            return chars.source == letter
        return chars.source == _ANY or self._member(chars.source, letter)

    def _state(self, *empty: int) -> int:
        self._empty.append(list(empty))
        self._step.append(None)
        return len(self._empty) - 1

    def _build(self, node: _Node, after: int) -> int:
        """The state at which `node` begins, where `after` follows it."""
        match node:
            case _Chars():
                state = self._state()
                self._step[state] = (node, after)
                return state
            case _Sequence(parts):
                for part in reversed(parts):
                    after = self._build(part, after)
                return after
            case _Choice(parts):
                return self._state(*(self._build(part, after) for part in parts))
            case _Look(part):
                return self._state(self._build(part, self._dead), after)
            case _Repeat(part, least, most):
                if most is None:
                    loop = self._state(after)
                    self._empty[loop].append(self._build(part, loop))
                    after = loop
                else:
                    for _ in range(most - least):
                        after = self._state(self._build(part, after), after)
                for _ in range(least):
                    after = self._build(part, after)
                return after

    def _closure(self, state: int) -> set[int]:
        seen, waiting = {state}, [state]
        while waiting:
            for other in self._empty[waiting.pop()]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return seen

    def _mask(self, state: int, bit: dict[int, int]) -> int:
        return sum(bit.get(other, 0) for other in self._closure(state))


class _Parser:
    """Reads the part of Oniguruma's syntax of which the reach is known."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parse(self) -> _Node:
        node = self._choice(folded=False)
        if self._at < len(self._text):
            raise RegexRefused("it has a parenthesis too many.")
        return node

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._text[at] if at < len(self._text) else ""

    def _take(self, count: int = 1) -> str:
        taken = self._text[self._at : self._at + count]
        if len(taken) < count:
            raise RegexRefused("it ends in the middle.")
        self._at += count
        return taken

    def _choice(self, *, folded: bool) -> _Node:
        parts = [self._sequence(folded=folded)]
        while self._peek() == "|":
            self._take()
            parts.append(self._sequence(folded=folded))
        return _Choice(tuple(parts)) if len(parts) > 1 else parts[0]

    def _sequence(self, *, folded: bool) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeats(self._atom(folded=folded)))
        return _Sequence(tuple(parts))

    def _repeats(self, node: _Node) -> _Node:
        repeated = False
        while True:
            match self._peek():
                case "?" | "+" if repeated:  # lazy, or possessive; behind braces they may repeat once more
                    more = None if self._take() == "+" else 1
                    if self._text[self._at - 2] == "}":
                        node = _Repeat(node, 0 if more else 1, more)
                    repeated = False
                    continue
                case "?":
                    self._take()
                    node = _Repeat(node, 0, 1)
                case "*":
                    self._take()
                    node = _Repeat(node, 0, None)
                case "+":
                    self._take()
                    node = _Repeat(node, 1, None)
                case "{":
                    node = self._counted(node)
                case _:
                    return node
            repeated = True

    def _counted(self, node: _Node) -> _Node:
        close = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : max(close, 0)].partition(",")
        if close < 0 or not (least or "0").isdigit() or not (most or "0").isdigit() or not (least or most):
            raise RegexRefused("it has braces that are no count.")
        self._at = close + 1
        low = int(least or 0)
        high = low if not comma else int(most) if most else None
        if max(low, high or 0) > _MOST_COPIES or (high is not None and high < low):
            raise RegexRefused("it repeats something too often.")
        return _Repeat(node, low, high)

    def _atom(self, *, folded: bool) -> _Node:
        letter = self._take()
        match letter:
            case "(":
                return self._group(folded=folded)
            case "[":
                return self._class(self._brackets(), folded=folded)
            case ".":
                return self._class(".", folded=folded)
            case "\\":
                return self._escape(folded=folded)
            case "^" | "$":
                raise RegexRefused(f'it looks at the ends of lines ("{letter}").')
            case "*" | "+" | "?" | "{":
                raise RegexRefused("it repeats nothing.")
            case _:
                return self._letter(letter, folded=folded)

    def _group(self, *, folded: bool) -> _Node:
        looks = False
        if self._peek() == "?":
            self._take()
            kind = self._take()
            if kind in "=!":
                looks = True
            elif kind == "i" and self._peek() in ":)":
                folded = True
                if self._take() == ")":  # for what follows in the group around it
                    return self._choice(folded=True)
            elif kind not in ":>":
                raise RegexRefused(f'it has a group of the kind "(?{kind}".')
        node = self._choice(folded=folded)
        if self._take() != ")":
            raise RegexRefused("it has a parenthesis too few.")
        return _Look(node) if looks else node

    def _brackets(self) -> str:
        """A class in brackets, which may have others in it, as it stands there."""
        begun, depth = self._at - 1, 1
        if self._peek() == "^":
            self._take()
        if self._peek() == "]":
            raise RegexRefused("it has an empty class.")
        while depth:
            letter = self._take()
            if letter == "\\":
                self._take()
            elif letter == "[":
                depth += 1
            elif letter == "]":
                depth -= 1
        return self._text[begun : self._at]

    def _escape(self, *, folded: bool) -> _Node:
        letter = self._take()
        if letter in "pP":
            close = self._text.find("}", self._at)
            if self._peek() != "{" or close < 0:
                raise RegexRefused("it has a property without braces.")
            source = f"\\{letter}{self._take(close + 1 - self._at)}"
            return self._class(source, folded=folded)
        if letter in _CLASSES:
            return self._class(f"\\{letter}", folded=folded)
        if letter in _CONTROLS:
            return self._letter(_CONTROLS[letter], folded=folded)
        if letter == "u":
            return self._letter(_character(self._take(4)), folded=folded)
        if letter == "x":
            if self._peek() != "{":
                return self._letter(_character(self._take(2)), folded=folded)
            close = self._text.find("}", self._at)
            digits = self._take(max(2, close + 1 - self._at))[1:-1]
            return self._letter(_character(digits), folded=folded)
        if letter.isalnum():
            raise RegexRefused(f'it has "\\{letter}".')
        return self._letter(letter, folded=folded)

    def _class(self, source: str, *, folded: bool) -> _Node:
        if folded:
            raise RegexRefused("it has a class of characters whose case does not matter.")
        return _Chars(source)

    def _letter(self, letter: str, *, folded: bool) -> _Node:
        if not folded or not letter.isalpha():
            return _Chars(letter, True)
        return _Repeat(_Chars(_ANY), 0, _FOLDED)


def _character(digits: str) -> str:
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise RegexRefused(f'"{digits}" is no character.') from None
