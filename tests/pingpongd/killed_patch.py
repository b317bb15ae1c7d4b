"""Runs `pingpongd patch` and dies at the n-th file that would be put in its place; n is the first argument."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pingpongd.patch_command import add_parser, patch

_replace = Path.replace
_left = int(sys.argv.pop(1))


def _dying(self: Path, target: Any) -> Path:
    global _left
    _left -= 1
    if _left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return _replace(self, target)


Path.replace = _dying  # type: ignore[method-assign]
parser = argparse.ArgumentParser()
add_parser(parser.add_subparsers())
sys.exit(patch(parser.parse_args()))
