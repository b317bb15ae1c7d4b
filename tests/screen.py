"""What a terminal shows after so many bytes: as much of one as rich's live displays ask for."""

from __future__ import annotations

import re

_CSI = re.compile(r"\x1b\[(?P<private>\?)?(?P<numbers>[\d;]*)(?P<verb>[A-Za-z])")
_LONGEST = 24
"""Characters of an escape sequence."""


class Screen:
    """Lines of characters of one cell each; a line that is too long goes on in the next, as in a terminal."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self._cells = [[" "] * width for _ in range(height)]
        self._at = (0, 0)
        self._main: tuple[list[list[str]], tuple[int, int]] | None = None
        self.scrolled: list[str] = []
        """Lines that have left it at the top."""
        self._rest = ""
        self.cursor_hidden = False
        self.alternate = False
        self.erased = 0
        """Times that all of it was erased."""

    @property
    def lines(self) -> list[str]:
        """Without blanks at the ends of lines, and without empty lines at the bottom."""
        lines = ["".join(line).rstrip() for line in self._cells]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def feed(self, text: str) -> None:
        """Show more; an escape sequence that it does not know is an error, and one that is cut waits for its end."""
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _CSI.match(text, at)
                if found is None and len(text) - at < _LONGEST:
                    self._rest = text[at:]
                    return
                assert found is not None, f"not known: {text[at : at + 20]!r}"
                self._control(found["verb"], found["numbers"], private=bool(found["private"]))
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    def _put(self, char: str) -> None:
        row, column = self._at
        if char == "\r":
            self._at = row, 0
        elif char == "\n":
            self._at = self._down(row), 0  # the terminal's driver makes \r\n of it
        else:
            if column == self.width:
                row, column = self._down(row), 0
            self._cells[row][column] = char
            self._at = row, column + 1

    def _down(self, row: int) -> int:
        if row < self.height - 1:
            return row + 1
        gone = "".join(self._cells.pop(0)).rstrip()
        if not self.alternate:
            self.scrolled.append(gone)
        self._cells.append([" "] * self.width)
        return row

    def _control(self, verb: str, numbers: str, *, private: bool) -> None:
        row, column = self._at
        number = int(numbers) if numbers.isdigit() else 0
        if private and number == 25:
            self.cursor_hidden = verb == "l"
        elif private and number == 1049:
            self._swap(on=verb == "h")
        elif verb == "A":
            self._at = max(0, row - (number or 1)), min(column, self.width - 1)
        elif verb == "K" and number == 2:
            self._cells[row] = [" "] * self.width
        elif verb == "H":
            assert not numbers, "only home is known"
            self._at = 0, 0
        elif verb == "J" and number == 2:
            self._cells = [[" "] * self.width for _ in range(self.height)]
            self.erased += 1
        else:
            assert verb == "m", f"not known: {numbers}{verb}"

    def _swap(self, *, on: bool) -> None:
        self.alternate = on
        if on:
            self._main = self._cells, self._at
            self._cells, self._at = [[" "] * self.width for _ in range(self.height)], (0, 0)
        else:
            assert self._main is not None
            self._cells, self._at = self._main
