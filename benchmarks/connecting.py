"""A benchmark's daemon: one started for it from a configuration, or one that runs already."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from local_daemon import local_daemon
from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import StatusReply
from pingpong_client import AsyncClient
from progress_bar import tell_stage
from provenance import command_line, provenance

_FIRST_TABLE = re.compile(r"^\s*\[", re.MULTILINE)


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `connection` reads."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, help="start a daemon with this file, and stop it at the end")
    where.add_argument("--socket", type=Path, help="a running daemon's socket or folder (default: the usual places)")
    parser.add_argument("--model", help="with --config: the model, over the file's")
    parser.add_argument("--dtype", help="with --config: over the file's")
    parser.add_argument("--grid-tokens", type=int, help='with --config: the cell of exactness "grid", over the file\'s')


@asynccontextmanager
async def connection(options: argparse.Namespace) -> AsyncIterator[AsyncClient]:
    """A client of the daemon that the command line names, or of one started for it."""
    if options.config is None:
        async with AsyncClient(options.socket) as client:
            yield client
        return
    changes = {"model": options.model, "dtype": options.dtype, "grid_tokens": options.grid_tokens}
    with tempfile.TemporaryDirectory(prefix="pingpong-config-") as private:
        config = changed_config(
            options.config, Path(private), {key: value for key, value in changes.items() if value is not None}
        )
        async with local_daemon(config, on_event=tell_stage) as folder, AsyncClient(folder) as client:
            yield client


def changed_config(path: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """The configuration itself, or where there are changes a copy of it in `folder` that has them.

    Raises:
        ConfigError: it cannot be read.
    """
    if not changes:
        return path
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    copy = folder / path.name
    copy.write_text(with_keys(text, changes), encoding="utf-8")
    return copy


def with_keys(text: str, changes: dict[str, Any]) -> str:
    """TOML with some top-level keys set to other strings or whole numbers."""
    table = _FIRST_TABLE.search(text)
    end = table.start() if table else len(text)
    head, rest = text[:end], text[end:]
    for key in changes:
        head = re.sub(rf"^{re.escape(key)}\s*=.*\n", "", head, flags=re.MULTILINE)
    # JSON's strings and numbers are TOML's, too.
    lines = [f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in changes.items()]
    return "".join(lines) + head + rest


def made_with(status: StatusReply) -> dict[str, Any]:
    """The provenance of what a daemon measured: this machine, and its engines."""
    engines = [
        {"group": worker.name, "devices": worker.devices, **msgspec.to_builtins(worker.limits)}
        for worker in status.workers
    ]
    for engine in engines:
        if Path(engine.get("model", "")).is_absolute():  # where a folder lies is nobody's business
            engine["model"] = Path(engine["model"]).name
    return {**provenance(), "engines": engines, "arguments": command_line()}
