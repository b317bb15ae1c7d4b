"""Makes the page of results: docs/benchmarks.md with its pictures, and the summary for machines.

    python benchmarks/page.py               # from benchmarks/results/*.jsonl; the same rows give the same files
    python benchmarks/page.py --check       # fails where the page or the summary is not what the rows give

Exit codes: 0; 1 where --check finds a difference; 64 and up: those of the client.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pages.document import Document, document
from pages.rows import read_results
from pages.style import save
from pingpong_bus.errors import PingpongError
from provenance import REPOSITORY


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Make the page of benchmark results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="another repository (%(default)s)")
    options = parser.parse_args()
    root = options.root.resolve()
    try:
        made = document(read_results(root / "benchmarks" / "results", root))
    except PingpongError as error:
        print(f"page.py: {error}", file=sys.stderr)
        return error.exit_code
    if options.check:
        stale = differences(made, root)
        for text in stale:
            print(f"page.py: {text}; run `python benchmarks/page.py`.", file=sys.stderr)
        return 1 if stale else 0
    write(made, root)
    return 0


def write(made: Document, root: Path) -> None:
    """Write everything.

    Raises:
        ImportError: matplotlib is not installed.
    """
    for name, text in made.texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for name, draw in made.pictures.items():
        save(draw(), root / name)


def differences(made: Document, root: Path) -> list[str]:
    """What is not as the rows say, in words.

    Pictures have only to be there: another version of matplotlib draws the same data with other bytes.
    """
    found = []
    for name, text in made.texts.items():
        path = root / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{name} is not what the results say")
    return found + [f"{name} is missing" for name in made.pictures if not (root / name).is_file()]


if __name__ == "__main__":
    sys.exit(main())
