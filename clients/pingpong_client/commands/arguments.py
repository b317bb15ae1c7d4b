"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import get_args

from pingpong_bus.chain import Exactness
from pingpong_bus.messages import Mode, SessionKind
from pingpong_client.jobs import MAX_DEADLINE_S, MAX_PRIORITY

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context: version, trace, parent, flags."""


def add_chain_file(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The chain file and its inputs."""
    parser.add_argument("chain", metavar="chain.json", nargs="?" if optional else None, help="the chain; - is stdin")
    parser.add_argument(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="value of an input of the chain; NAME=@FILE reads a file; may be repeated",
    )


def add_chain_id(parser: argparse.ArgumentParser) -> None:
    """The id of a submitted chain."""
    parser.add_argument("id", metavar="ID", help="id that `submit` printed, see also `list`")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The choice of JSON."""
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def add_mode(parser: argparse.ArgumentParser) -> None:
    """The choice of placement."""
    parser.add_argument(
        "--mode",
        choices=get_args(Mode),
        default="auto",
        help="placement: serial, one agent after the other on one group; ping-pong, reading ahead on another group; "
        "overlap, reading ahead on the same; auto, the one that should take least now, see --explain (default: auto)",
    )


def add_exactness(parser: argparse.ArgumentParser, default: str) -> None:
    """The choice of level; the default is described, for it is not known here."""
    parser.add_argument(
        "--exactness", choices=get_args(Exactness), help=f"what is promised of the output (default: {default})"
    )


def add_session(parser: argparse.ArgumentParser) -> None:
    """The choice of session."""
    parser.add_argument(
        "--session", choices=get_args(SessionKind), help="how prompts grow (default: the daemon's choice)"
    )


def add_speculate(parser: argparse.ArgumentParser) -> None:
    """Whether tokens are guessed."""
    parser.add_argument(
        "--speculate",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="guess tokens from prompts and from earlier runs of the chain, and check several a step; of agents and "
        "chains that do not say themselves (default: the daemon's choice)",
    )


def positive(text: str) -> int:
    """An argument that is a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def seconds(text: str) -> float:
    """An argument that is a time in seconds, 0 included."""
    value = float(text)
    if not 0 <= value <= MAX_DEADLINE_S:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MAX_DEADLINE_S}")
    return value


def deadline(text: str) -> float:
    """An argument that is a time in seconds, above 0."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 leaves no time at all")
    return value


def priority(text: str) -> int:
    """An argument that is a chain's priority."""
    value = int(text)
    if abs(value) > MAX_PRIORITY:
        raise argparse.ArgumentTypeError(f"{value} is not between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    return value


def traceparent(text: str) -> str:
    """An argument that is a W3C trace context."""
    if _TRACEPARENT.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no trace context, which looks like 00-<32 hex>-<16 hex>-01")
    return text


def trace_context(environ: Mapping[str, str]) -> str | None:
    """The trace that this command belongs to by its environment; one that makes no sense is passed over."""
    text = environ.get("TRACEPARENT", "")
    return text if _TRACEPARENT.fullmatch(text) else None
