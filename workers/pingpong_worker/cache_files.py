"""Small files that keep what was learnt of one kind of engine, so that its next start knows it.

They lie below ``$XDG_CACHE_HOME/pingpongd``, one for each kind, and say themselves what they were learnt on. They are a
cache and nothing more: one that cannot be read, or was learnt on something else, is as good as none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from pingpong_worker.model_store import default_cache

_NAME_CHARS = 60

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineKind(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's times depend on, as far as names say it."""

    device: str
    """Such as "NVIDIA H200", or "2 x NVIDIA H200" where an engine spans two."""
    model: str
    dtype: str
    engine: str
    """With its version, such as "vllm 0.32.0"."""


def kind_path(kind: EngineKind, what: str, folder: Path | None = None) -> Path:
    """Where something is kept of such an engine.

    The name has the model's and a digest of everything, since model names hold slashes and may be long.

    Args:
        kind: of the engine.
        what: is kept, such as "step-prices"; names the folder in the cache.
        folder: another one.
    """
    digest = hashlib.blake2b(msgspec.json.encode(kind), digest_size=8).hexdigest()
    name = re.sub(r"[^A-Za-z0-9.]+", "-", kind.model).strip("-.")[-_NAME_CHARS:]
    return (folder or default_cache().parent / what) / f"{name}-{digest}.json"


def read_kept(path: Path, decode: Callable[[bytes], T]) -> T | None:
    """What a file holds; None, and a line in the log, where it is no good.

    Args:
        path: as `kind_path` gives it.
        decode: raises TypeError or ValueError (as msgspec does) for what is no good.
    """
    try:
        return decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, TypeError, ValueError) as error:
        _logger.warning("%s is not used: %s", path, error)
        return None


def keep(path: Path, data: bytes) -> None:
    """Write a file; a reader sees the old one or the new one. Where there is no room, a line in the log is all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        _logger.warning("%s is not kept: %s", path, error)
