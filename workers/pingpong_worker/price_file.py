"""Keeps the step prices that an engine has learnt, so that its next start knows them; see `cache_files.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from pingpong_worker.cache_files import EngineKind, keep, kind_path, read_kept
from pingpong_worker.step_prices import StepPrices

FORMAT: Final = 2
"""Raised when prices come to mean something else."""


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    kind: EngineKind
    """Graph sizes are part of the prices."""
    prices: dict[str, Any]


_decoder = msgspec.json.Decoder(_Content)


def price_path(kind: EngineKind, folder: Path | None = None) -> Path:
    """Where the prices of such an engine are kept: in `folder`, by default the cache's."""
    return kind_path(kind, "step-prices", folder)


def load_prices(kind: EngineKind, folder: Path | None = None) -> dict[str, Any] | None:
    """What `save_prices` kept for such an engine; None, and a line in the log, where the file is no good."""

    def decode(data: bytes) -> dict[str, Any]:
        content = _decoder.decode(data)
        if content.format != FORMAT or content.kind != kind:
            raise ValueError("it was learnt on something else")
        StepPrices.from_dict(content.prices)
        return content.prices

    return read_kept(price_path(kind, folder), decode)


def save_prices(kind: EngineKind, prices: dict[str, Any], folder: Path | None = None) -> None:
    """Keep them; see `cache_files.keep`."""
    keep(price_path(kind, folder), msgspec.json.encode(_Content(format=FORMAT, kind=kind, prices=prices)))
