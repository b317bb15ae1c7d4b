"""Makes docs/logs.md: every event of the daemon's log with its fields, from `pingpongd/log_catalogue.py`.

    python benchmarks/logs_page.py
    python benchmarks/logs_page.py --check      # fails where the page is not what the catalogue says

Exit codes: 0; 1 where --check finds a difference.
"""

from __future__ import annotations

import argparse
import sys

from pingpongd.log_catalogue import GROUPS, meaning
from pingpongd.log_event import Event, Limit
from pingpongd.log_fields import COMMON
from provenance import REPOSITORY

PAGE = REPOSITORY / "docs" / "logs.md"
_INTRODUCTION = """\
# The daemon's log

<!-- Made by `python benchmarks/logs_page.py` from pingpongd/pingpongd/log_catalogue.py: change that. -->

One JSON object a line, on standard error; in systemd's journal each has its priority. On a terminal it is for people,
unless `--log-format json` is given. Names are stable: events and fields may be added, and none changes its meaning; a
reader passes over what it does not know. [monitoring/logs.md](monitoring/logs.md) tells how to read it with
`pingpong-client jitter`, what is left out of it, and how often lines may come.
"""


def page() -> str:
    """The page's text."""
    parts = [_INTRODUCTION, "## Fields of every line\n", _table([(name, *field) for name, field in COMMON.items()])]
    for title, events in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [_section(name, event) for name, event in events.items()]
    return "\n".join(parts)


def _section(name: str, event: Event) -> str:
    levels = " or ".join(event.levels) if len(event.levels) < 3 else ", ".join(event.levels)
    rows = [(field, *meaning(event, field)) for field in event.fields]
    return f"### `{name}`\n\n{levels}: {event.says}. {_limit(event.limit)}\n\n{_table(rows)}"


def _limit(limit: Limit) -> str:
    each = f" for each {' and '.join(f'`{field}`' for field in limit.key)}" if limit.key else ""
    rate = f"{limit.per_s:g} a second" if limit.per_s >= 1 else f"one in {1 / limit.per_s:g} s"
    return f"At most {rate}{each}, {limit.burst:,} at once."


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| `{name}` | {unit} | {text} |" for name, unit, text in rows]
    return "\n".join(["| field | unit or kind | what |", "|---|---|---|", *lines, ""])


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Make the page of log events.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page would change")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        print("logs_page.py: docs/logs.md is not what the catalogue says; run it without --check.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
