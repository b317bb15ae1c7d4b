"""Fetching a model in a process of its own: ``python -m pingpong_worker.model_fetch NAME``.

`resolve_model` may take minutes and cannot be interrupted; a process can. It prints one JSON object a line: stages as
``{"stage": ...}``, how far one has come as ``{"progress": ...}`` (a `Progress`), and last ``{"path": ...}``, or
``{"error": {"message", "hint", "field"}}`` with exit code 78.
"""

from __future__ import annotations

import json
import os
import sys

import msgspec

from pingpong_bus.errors import ConfigError
from pingpong_worker.model_store import resolve_model
from pingpong_worker.parent_death import die_with_parent


def main(name: str) -> int:
    """Resolve the model and print what came of it."""
    die_with_parent(os.getppid())

    def say(**line: object) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    try:
        path = resolve_model(
            name,
            progress=lambda stage: say(stage=stage),
            on_progress=lambda progress: say(progress=msgspec.to_builtins(progress)),
        )
        say(path=str(path))
    except ConfigError as error:
        say(error={"message": error.message, "hint": error.hint, "field": error.field})
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
