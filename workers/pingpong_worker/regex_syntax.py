"""Oniguruma's regular expressions, as far as it is known how far they look: text to a tree. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ANY", "Chars", "Choice", "Look", "Node", "RegexRefused", "Repeat", "Sequence", "parse"]

_MOST_COPIES = 64
"""Of a part that is repeated so many times at most; the automaton has a copy for each."""
_CLASSES = frozenset("sSdDwWhH")
_CONTROLS = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_FOLDED = 3
"""As many characters may fold to one, or one to as many, where case does not matter."""
ANY = ""
"""The class of all characters."""


class RegexRefused(ValueError):
    """The expression has something of which it is not known how far it looks."""


@dataclass(frozen=True)
class Chars:
    """One character: `source` is a class as the engine reads it, or `literal` the character itself."""

    source: str
    literal: bool = False


@dataclass(frozen=True)
class Sequence:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of them."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """One part so many times; `most` is None for any number."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Look:
    """What is looked ahead for, wanted or not."""

    part: Node


Node = Chars | Sequence | Choice | Repeat | Look


def parse(pattern: str) -> Node:
    """The tree of an expression.

    Raises:
        RegexRefused: it has something else in it.
    """
    return _Parser(pattern).parse()


class _Parser:
    """Reads the part of Oniguruma's syntax of which the reach is known."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parse(self) -> Node:
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

    def _choice(self, *, folded: bool) -> Node:
        parts = [self._sequence(folded=folded)]
        while self._peek() == "|":
            self._take()
            parts.append(self._sequence(folded=folded))
        return Choice(tuple(parts)) if len(parts) > 1 else parts[0]

    def _sequence(self, *, folded: bool) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeats(self._atom(folded=folded)))
        return Sequence(tuple(parts))

    def _repeats(self, node: Node) -> Node:
        repeated = False
        while True:
            match self._peek():
                case "?" | "+" if repeated:  # lazy, or possessive; behind braces they may repeat once more
                    more = None if self._take() == "+" else 1
                    if self._text[self._at - 2] == "}":
                        node = Repeat(node, 0 if more else 1, more)
                    repeated = False
                    continue
                case "?":
                    self._take()
                    node = Repeat(node, 0, 1)
                case "*":
                    self._take()
                    node = Repeat(node, 0, None)
                case "+":
                    self._take()
                    node = Repeat(node, 1, None)
                case "{":
                    node = self._counted(node)
                case _:
                    return node
            repeated = True

    def _counted(self, node: Node) -> Node:
        close = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : max(close, 0)].partition(",")
        if close < 0 or not (least or "0").isdigit() or not (most or "0").isdigit() or not (least or most):
            raise RegexRefused("it has braces that are no count.")
        self._at = close + 1
        low = int(least or 0)
        high = low if not comma else int(most) if most else None
        if max(low, high or 0) > _MOST_COPIES or (high is not None and high < low):
            raise RegexRefused("it repeats something too often.")
        return Repeat(node, low, high)

    def _atom(self, *, folded: bool) -> Node:
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

    def _group(self, *, folded: bool) -> Node:
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
        return Look(node) if looks else node

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

    def _escape(self, *, folded: bool) -> Node:
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

    def _class(self, source: str, *, folded: bool) -> Node:
        if folded:
            raise RegexRefused("it has a class of characters whose case does not matter.")
        return Chars(source)

    def _letter(self, letter: str, *, folded: bool) -> Node:
        if not folded or not letter.isalpha():
            return Chars(letter, True)
        return Repeat(Chars(ANY), 0, _FOLDED)


def _character(digits: str) -> str:
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise RegexRefused(f'"{digits}" is no character.') from None
