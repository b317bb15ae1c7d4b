"""The command line: ``pingpong-client COMMAND``.

Exit codes: 0 fine, 1 the chain failed or is not known, 2 usage, 3 not equal, 65 bad data, 69 no daemon (or it takes no
work now), 70 a fault inside, 74 the output or the chain store cannot be written, 78 bad configuration, 129 the terminal
was closed, 130 interrupted, 141 the reader of the output has gone, 143 terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from pingpong_bus.errors import PingpongError, UsageError
from pingpong_client.client import RECONNECT_S, AsyncClient
from pingpong_client.commands import (
    attach,
    cancel,
    drain,
    forget,
    jitter,
    result,
    schema,
    status,
    submit,
    timeline,
    top,
    verify,
)
from pingpong_client.commands import list as list_chains
from pingpong_client.commands.arguments import seconds
from pingpong_client.commands.context import Command, Context

COMMANDS: dict[str, Command] = {
    "submit": submit,
    "verify": verify,
    "attach": attach,
    "result": result,
    "timeline": timeline,
    "jitter": jitter,
    "list": list_chains,
    "status": status,
    "top": top,
    "cancel": cancel,
    "forget": forget,
    "drain": drain,
    "schema": schema,
}
_WITH_CHAINS = ("submit", "attach", "verify")
"""Commands that have chains run while they write."""
OUTPUT_LOST = 74
INTERRUPTED = 130
BROKEN_PIPE = 141
_SIGNALLED = 128
_EXIT_CODES = """\
exit codes:
  0    fine
  1    the chain failed, was cancelled, or is not known
  2    usage
  3    verify found a difference
  65   bad data: a chain file, an input
  69   no daemon answers, or it takes no work now
  70   a fault inside
  74   the output cannot be written, or the daemon's chain store is full or cannot be
  78   the daemon's configuration cannot work
  129  the terminal was closed
  130  interrupted (Ctrl-C)
  141  the reader of the output has gone
  143  terminated
"""


class _EndedBySignal(BaseException):
    """A signal has ended the command."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = _SIGNALLED + number


class _Parser(argparse.ArgumentParser):
    """Usage errors are one sentence, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", hint=f"See `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; expected faults are one line on standard error."""
    _open_closed_streams()
    command = ""
    try:
        args = build_parser().parse_args(arguments)
        command = args.command
        context = Context(
            args,
            sys.stdin.buffer,
            sys.stdout,
            sys.stderr,
            connect=lambda: AsyncClient(args.socket, instance=args.instance, reconnect_s=args.reconnect),
        )
        return asyncio.run(_run(COMMANDS[command], context))
    except PingpongError as error:
        sys.stderr.write(f"pingpong-client: {' '.join(str(error).split())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except _EndedBySignal as ended:
        return ended.exit_code
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        _drop_output()
        way_out = " Chains go on: see list." if command in _WITH_CHAINS else ""
        sys.stderr.write(f"pingpong-client: the output cannot be written: {error.strerror}.{way_out}\n")
        return OUTPUT_LOST


def _drop_output() -> None:
    """Python flushes standard output once more at its end, which would fail with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each takes the options that name the daemon before or after its name."""
    parser = _Parser(
        prog="pingpong-client",
        description="Run chains of agents on a pingpongd daemon.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pingpong-client {version('pingpongd')}")
    _add_daemon_options(parser)
    parser.set_defaults(socket=None, instance=None, reconnect=RECONNECT_S)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
        _add_daemon_options(sub)
        command.add_arguments(sub)
    return parser


def _open_closed_streams() -> None:
    """A shell may have closed any of the three; Python then has None in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for good


async def _run(command: Command, context: Context) -> int:
    """Run a command; SIGTERM and a terminal that is closed end it like Ctrl-C, so that it can leave in order."""
    received: list[signal.Signals] = []
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - it is a coroutine's

    def end(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await command.run(context)
    except asyncio.CancelledError:
        if received:
            raise _EndedBySignal(received[0]) from None
        raise


def _add_daemon_options(parser: argparse.ArgumentParser) -> None:
    """Without defaults: those of a command would overwrite what stands before its name."""
    absent = argparse.SUPPRESS
    parser.add_argument(
        "--socket", metavar="PATH", default=absent, help="the daemon's control socket, or the folder that holds it"
    )
    parser.add_argument("--instance", metavar="NAME", default=absent, help="the daemon's instance, instead of --socket")
    parser.add_argument(
        "--reconnect",
        metavar="SECONDS",
        type=seconds,
        default=absent,
        help=f"how long a daemon that has gone is waited for while a chain is followed (default: {RECONNECT_S:g})",
    )
