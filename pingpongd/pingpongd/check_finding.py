"""What `pingpongd check` says about one thing."""

from __future__ import annotations

from typing import Literal

import msgspec

from pingpong_bus.errors import PingpongError


class Finding(msgspec.Struct, frozen=True):
    """One line of `pingpongd check`."""

    name: str
    level: Literal["ok", "warning", "error"]
    """An error can never work; with a warning it works, but not well, or not for long."""
    text: str
    hint: str = ""
    """What to do."""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.name:<14} {self.text}" + (f" {self.hint}" if self.hint else "")


def passed(name: str, text: str) -> Finding:
    """It is as it should be."""
    return Finding(name, "ok", text)


def doubtful(name: str, text: str, hint: str) -> Finding:
    """It works, but."""
    return Finding(name, "warning", text, hint)


def failed(name: str, error: PingpongError) -> Finding:
    """It can never work, and the error says why."""
    text = f"{error.field}: {error.message}" if error.field else error.message
    return Finding(name, "error", text, error.hint)
