"""Every error that pingpongd raises on purpose.

::

    PingpongError
    ├── UsageError            2   the command line is off
    ├── DataError            65   what a user handed in is off
    │   ├── ChainError            a chain file or a chain's inputs
    │   └── MessageError          a frame on a socket: garbage, too large, another protocol version
    ├── DaemonUnavailable    69   nobody answers on the control socket
    │   └── Overloaded            it answers, and refuses: no slot, no group, draining
    ├── StoreError           74   the chain store cannot be written, or read
    ├── ConfigError          78   the daemon's configuration, its model or its devices
    ├── ChainNotFound         1   no chain of that id
    ├── ChainFailed           1   the chain ended without a result
    │   └── EngineError           an engine failed or refused a request
    │       └── EngineLost        the engine is gone; another can go on from the committed tokens
    ├── NotEqual              3   `verify` found a difference
    └── BusError             70   the token bus
        ├── SlabFull              no free slot, or no shared memory
        ├── LogFull               an append past a log's capacity
        ├── LogClosed             an append to a log that has its close record
        └── StreamGone            the slot belongs to another generation now

The number is the exit code of a command that ends with that error. Each error is one sentence that names the
field or thing, and one that says the way out.
"""

from __future__ import annotations

from typing import ClassVar


class PingpongError(Exception):
    """Base of the tree.

    Args:
        message: one sentence that names the thing that is wrong.
        hint: the way out, one sentence; may be empty.
        field: the path of the field at fault, such as ``agents[2].prompt``; may be empty.
    """

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str = "", field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}" if self.field else self.message
        return f"{text} {self.hint}" if self.hint else text

    @property
    def code(self) -> str:
        """The error's stable name on the wire and in JSON: its class name."""
        return type(self).__name__


class UsageError(PingpongError):
    """The command line is off."""

    exit_code = 2


class DataError(PingpongError):
    """What a user handed in is off."""

    exit_code = 65


class ChainError(DataError):
    """A chain file, or the inputs given for it, is not valid."""


class MessageError(DataError):
    """A frame could not be decoded: garbage, too large, or of another protocol version."""


class DaemonUnavailable(PingpongError):
    """Nobody answers on the control socket."""

    exit_code = 69


class Overloaded(DaemonUnavailable):
    """The daemon answers and refuses the work for now."""


class StoreError(PingpongError):
    """The chain store cannot be written, or what is in it cannot be read."""

    exit_code = 74


class ConfigError(PingpongError):
    """The daemon's configuration, its model or its devices cannot work."""

    exit_code = 78


class ChainNotFound(PingpongError):
    """No chain of that id is known to the daemon."""

    exit_code = 1


class ChainFailed(PingpongError):
    """The chain ended without a result."""

    exit_code = 1


class EngineError(ChainFailed):
    """An engine failed, or refused a request."""


class EngineLost(EngineError):
    """The engine is gone, and with it nothing but its own state: another can go on from the committed tokens."""


class NotEqual(PingpongError):
    """Two runs that had to be equal were not."""

    exit_code = 3


class BusError(PingpongError):
    """Base of what the token bus raises."""


class SlabFull(BusError):
    """No free slot, or not enough shared memory for the slab."""


class LogFull(BusError):
    """An append would pass the log's capacity."""


class LogClosed(BusError):
    """The log already has its close record."""


class StreamGone(BusError):
    """The slot has been given to another generation; what was read of it must be thrown away."""


def error_from_code(code: str, message: str, *, hint: str = "", field: str = "") -> PingpongError:
    """Rebuild an error that came over the wire; an unknown code becomes the base class."""
    kinds: list[type[PingpongError]] = [PingpongError]
    for kind in kinds:
        if kind.__name__ == code:
            return kind(message, hint=hint, field=field)
        kinds.extend(kind.__subclasses__())
    return PingpongError(message, hint=hint, field=field)
