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

from pingpong_worker.regex_syntax import ANY, Chars, Choice, Look, Node, RegexRefused, Repeat, Sequence, parse

__all__ = ["Reach", "RegexRefused"]

_MOST_STEPS = 100_000
"""Remembered steps of the automaton, and characters."""


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
        node = Sequence(tuple(Chars(letter, True) for letter in pattern)) if literal else parse(pattern)
        self._empty: list[list[int]] = []
        """For each state, those that are reached without a character."""
        self._step: list[tuple[Chars, int] | None] = []
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

    def _takes(self, chars: Chars, letter: str) -> bool:
        if chars.literal:
            return chars.source == letter
        return chars.source == ANY or self._member(chars.source, letter)

    def _state(self, *empty: int) -> int:
        self._empty.append(list(empty))
        self._step.append(None)
        return len(self._empty) - 1

    def _build(self, node: Node, after: int) -> int:
        """The state at which `node` begins, where `after` follows it."""
        match node:
            case Chars():
                state = self._state()
                self._step[state] = (node, after)
                return state
            case Sequence(parts):
                for part in reversed(parts):
                    after = self._build(part, after)
                return after
            case Choice(parts):
                return self._state(*(self._build(part, after) for part in parts))
            case Look(part):
                return self._state(self._build(part, self._dead), after)
            case Repeat(part, least, most):
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
