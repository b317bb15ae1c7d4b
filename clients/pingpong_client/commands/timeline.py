"""Show where a chain's time went."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from pingpong_bus.errors import UsageError
from pingpong_bus.messages import ChainResult
from pingpong_client import plotting
from pingpong_client.commands.context import Context
from pingpong_client.output_file import write_file, writer_of
from pingpong_client.result_file import read_result
from pingpong_client.timeline_spans import chain_end_ms, hops_of
from pingpong_client.timeline_text import timeline_lines

HELP = "show what each device did for a chain and when, and the account: hidden, exposed, wasted, predicted"
_PIPED_WIDTH, _FILE_WIDTH = 100, 120
_MOST = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "chains",
        metavar="ID|FILE.json",
        nargs="+",
        help="a chain's id, or its result as `result --json` prints it (- is stdin); several, such as one in series "
        "and one that read ahead, are shown on one axis of time",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="write FILE in the form of its suffix: .json (trace events: open it with https://ui.perfetto.dev), .html "
        "(one page that needs no other file), .png, .svg or .txt",
    )


async def run(context: Context) -> int:
    chains, output = context.args.chains, context.args.output
    if len(chains) > _MOST or chains.count("-") > 1:
        raise UsageError(f"at most {_MOST} chains are shown, and one of standard input.", hint="Name fewer.")
    write = writer_of(output, _FORMS) if output is not None else None
    results = await _results(context, chains)
    if write is not None:
        write_file(output, write(results))
    else:
        context.write(*_text(results, context.width or _PIPED_WIDTH))
    return 0


async def _results(context: Context, chains: Sequence[str]) -> list[ChainResult]:
    """The chains in the order in which they were named; the daemon is asked only where it has to be."""
    found = {name: read_result(name, context.stdin) for name in chains if _is_file(name)}
    if asked := [name for name in chains if name not in found]:
        async with context.connect() as client:
            for name in asked:
                found[name] = await client.result(name)
    return [found[name] for name in chains]


def _is_file(name: str) -> bool:
    return name == "-" or name.endswith(".json") or "/" in name


def _text(results: Sequence[ChainResult], width: int) -> list[str]:
    end = max(chain_end_ms(result) for result in results)
    lines: list[str] = []
    for result in results:
        lines += [*([""] if lines else []), *timeline_lines(result, width, end_ms=end)]
    return lines


def _write_text(results: Sequence[ChainResult]) -> bytes:
    return "".join(f"{line}\n" for line in _text(results, _FILE_WIDTH)).encode()


def _write_json(results: Sequence[ChainResult]) -> bytes:
    from pingpong_client.timeline_trace import trace_json

    return trace_json(results) + b"\n"


def _write_page(results: Sequence[ChainResult]) -> bytes:
    from pingpong_client.timeline_page import timeline_page

    return timeline_page(results).encode()


def _write_png(results: Sequence[ChainResult]) -> bytes:
    from pingpong_client.timeline_picture import figure

    return plotting.png(figure(_drawable(results)))


def _write_svg(results: Sequence[ChainResult]) -> bytes:
    from pingpong_client.timeline_picture import figure

    return plotting.svg(figure(_drawable(results)))


def _drawable(results: Sequence[ChainResult]) -> Sequence[ChainResult]:
    for result in results:
        if not any(hops_of(agent) for agent in result.agents):
            raise UsageError(f"the chain {result.id} has not run yet.", hint="Wait until it has begun.")
    return results


_FORMS: dict[str, Callable[[Sequence[ChainResult]], bytes]] = {
    ".json": _write_json,
    ".html": _write_page,
    ".png": _write_png,
    ".svg": _write_svg,
    ".txt": _write_text,
}
