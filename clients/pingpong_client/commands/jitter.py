"""Report from the daemon's log how steadily devices decoded; needs no daemon."""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import msgspec

from pingpong_bus.errors import DataError, UsageError
from pingpong_client import plotting
from pingpong_client.commands.arguments import add_json
from pingpong_client.commands.context import Context
from pingpong_client.jitter_builder import JitterBuilder
from pingpong_client.jitter_report import JitterReport
from pingpong_client.jitter_text import event_line, report_lines
from pingpong_client.log_lines import Lines
from pingpong_client.log_sources import file_chunks, growing_chunks, journal_chunks, pipe_chunks
from pingpong_client.log_times import parse_time
from pingpong_client.output_file import write_file, writer_of

HELP = "report from a daemon's log how steadily its devices decoded, and why not"
_UNIT = "pingpongd"
_TEXT_WIDTH = 110
_WRITTEN_EVERY_S = 10.0
"""Files of a log that is followed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "files", metavar="FILE", nargs="*", help="logs of the daemon, also compressed by gzip; - is standard input"
    )
    parser.add_argument(
        "--journal",
        metavar="UNIT",
        nargs="?",
        const="",
        help=f"read systemd's journal instead (default: {_UNIT}, with --instance NAME {_UNIT}@NAME)",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="go on, and tell of what happens as it does")
    for name, meaning in (("since", "from"), ("until", "to")):
        parser.add_argument(
            f"--{name}",
            metavar="TIME",
            type=partial(_time, now=time.time()),
            help=f"{meaning} this time: 2026-11-30T14:00 (UTC), 14:00, or so long ago: 90min, 6h, 2d",
        )
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="write the report to a file, .html, .png, .svg, .json or .txt, instead of showing it; may be repeated",
    )


async def run(context: Context) -> int:
    args = context.args
    outputs: list[Path] = args.output
    writers = {path: writer_of(path, _FORMS) for path in outputs}
    if args.since is not None and args.until is not None and args.since > args.until:
        raise UsageError("--since is later than --until.", hint="Swap them.")
    builder = JitterBuilder(args.since, args.until)
    source = _source(context)
    if args.follow:
        await _follow(context, builder, source, writers)
    else:
        async for lines in source:
            builder.feed(lines)
    if not builder.heard:
        raise DataError(
            "there is no line of a pingpongd log.",
            hint="It takes the daemon's JSON lines: `--log-format json`, where standard error is a terminal.",
        )
    _finish(context, builder, writers)
    return 0


async def _follow(
    context: Context,
    builder: JitterBuilder,
    source: AsyncIterator[list[bytes]],
    writers: dict[Path, Callable[[JitterReport], bytes]],
) -> None:
    """Tell of each record that says something new; Ctrl-C ends it with the report."""
    written = time.monotonic()
    try:
        async for lines in source:
            for line, record in builder.feed(lines):
                if context.args.json:
                    context.write(line.data.decode(errors="replace").rstrip())
                elif (text := event_line(line.at, record)) is not None:
                    context.write(text)
            if writers and builder.heard and time.monotonic() - written > _WRITTEN_EVERY_S:
                _write_files(builder.report(), writers)
                written = time.monotonic()
    except BaseException:
        if builder.heard:
            _finish(context, builder, writers)
        raise


def _finish(context: Context, builder: JitterBuilder, writers: dict[Path, Callable[[JitterReport], bytes]]) -> None:
    report = builder.report()
    _write_files(report, writers)
    if context.args.json:
        context.write_json(report)
    elif not writers:
        context.write(*report_lines(report, context.width))


def _write_files(report: JitterReport, writers: dict[Path, Callable[[JitterReport], bytes]]) -> None:
    """Each at once: whoever looks at a file that is written again and again sees a whole one."""
    for path, writer in writers.items():
        write_file(path, writer(report))


def _text(report: JitterReport) -> bytes:
    return "".join(f"{line}\n" for line in report_lines(report, _TEXT_WIDTH)).encode()


def _json(report: JitterReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _html(report: JitterReport) -> bytes:
    from pingpong_client.jitter_page import page

    return page(report).encode()


def _png(report: JitterReport) -> bytes:
    from pingpong_client.jitter_picture import draw

    return plotting.png(draw(report))


def _svg(report: JitterReport) -> bytes:
    from pingpong_client.jitter_picture import draw

    return plotting.svg(draw(report))


_FORMS: dict[str, Callable[[JitterReport], bytes]] = {
    ".html": _html,
    ".png": _png,
    ".svg": _svg,
    ".json": _json,
    ".txt": _text,
}


async def _source(context: Context) -> AsyncIterator[list[bytes]]:
    """The lines that the command line names."""
    args = context.args
    files: list[str] = args.files
    if args.journal is not None:
        if files:
            raise UsageError("--journal and files exclude each other.", hint="Name the unit right behind --journal.")
        unit = args.journal or (f"{_UNIT}@{args.instance}" if args.instance else _UNIT)
        async for lines in _cut(journal_chunks(unit, since=args.since, until=args.until, follow=args.follow)):
            yield lines
        return
    if not files:
        raise UsageError("no log is named.", hint="Name files, - for standard input, or --journal.")
    if args.follow and files != ["-"]:
        if "-" in files:
            raise UsageError("standard input and files cannot be followed together.", hint="Follow one of them.")
        cutters = {Path(name): Lines() for name in files}
        async for path, data in growing_chunks(list(cutters)):
            yield cutters[path].feed(data)
        return
    for name in files:
        async for lines in _cut(pipe_chunks(context.stdin) if name == "-" else file_chunks(Path(name))):
            yield lines


async def _cut(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    cutter = Lines()
    async for data in chunks:
        yield cutter.feed(data)
    yield cutter.end()


def _time(text: str, now: float) -> float:
    try:
        return parse_time(text, now)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f'"{text}" is no time: see --help') from None
