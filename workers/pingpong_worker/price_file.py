"""Keeps the step prices that an engine has learnt, so that its next start knows them.

One small file for each kind of engine, below ``$XDG_CACHE_HOME/pingpongd/step-prices``. It says itself what it was
learnt on. It is a cache and nothing more: one that cannot be read, or was learnt on something else, is as good as none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from pingpong_worker.model_store import default_cache
from pingpong_worker.step_prices import StepPrices

FORMAT: Final = 2
"""Raised when prices come to mean something else."""
_NAME_CHARS = 60

_logger = logging.getLogger(__name__)


class EngineKind(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's price depends on, as far as names say it; graph sizes are part of the prices."""

    device: str
    """Such as "NVIDIA H200", or "2 x NVIDIA H200" where an engine spans two."""
    model: str
    dtype: str
    engine: str
    """With its version, such as "vllm 0.32.0"."""


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    kind: EngineKind
    prices: dict[str, Any]


_decoder = msgspec.json.Decoder(_Content)


def price_path(kind: EngineKind, folder: Path | None = None) -> Path:
    """Where the prices of such an engine are kept.

    The name has the model's and a digest of everything, since model names hold slashes and may be long.

    Args:
        kind: of the engine.
        folder: by default the cache's.
    """
    digest = hashlib.blake2b(msgspec.json.encode(kind), digest_size=8).hexdigest()
    name = re.sub(r"[^A-Za-z0-9.]+", "-", kind.model).strip("-.")[-_NAME_CHARS:]
    return (folder or default_cache().parent / "step-prices") / f"{name}-{digest}.json"


def load_prices(kind: EngineKind, folder: Path | None = None) -> dict[str, Any] | None:
    """What `save_prices` kept for such an engine; None, and a line in the log, where the file is no good."""
    path = price_path(kind, folder)
    try:
        content = _decoder.decode(path.read_bytes())
        if content.format != FORMAT or content.kind != kind:
            raise ValueError("it was learnt on something else")
        StepPrices.from_dict(content.prices)
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        _logger.warning("step prices in %s are not used: %s", path, error)
        return None
    return content.prices


def save_prices(kind: EngineKind, prices: dict[str, Any], folder: Path | None = None) -> None:
    """Keep them; a reader sees the old file or the new one. Where there is no room, a line in the log is all."""
    path = price_path(kind, folder)
    data = msgspec.json.encode(_Content(format=FORMAT, kind=kind, prices=prices))
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
        _logger.warning("step prices are not kept in %s: %s", path, error)
