"""Keeps what an engine was measured to take, so that its next start need not measure; see `cache_files.py`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from pingpong_bus.messages import EngineFigures, EngineLimits
from pingpong_worker.cache_files import EngineKind, keep, kind_path, read_kept
from pingpong_worker.config import WorkerConfig

FORMAT: Final = 1
"""Raised when figures come to mean something else, or are measured otherwise."""


class FiguresKind(EngineKind, frozen=True, kw_only=True):
    """What an engine's figures depend on: more than its prices, which its scheduler corrects as it goes."""

    settings: str
    """A digest of the configuration that the engine was started with."""


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    kind: FiguresKind
    figures: EngineFigures


_decoder = msgspec.json.Decoder(_Content)


def figures_kind(limits: EngineLimits, config: WorkerConfig) -> FiguresKind:
    """Of a started engine."""
    settings = (
        config.session,
        config.decode_first,
        config.paces,
        config.batch_invariant,
        config.engine_args,
        config.environment,
        config.simulated if config.engine == "simulated" else None,
        limits.max_model_len,
        limits.max_num_seqs,
    )
    return FiguresKind(
        device=limits.device,
        model=limits.model,
        dtype=limits.dtype,
        engine=limits.engine,
        settings=hashlib.blake2b(msgspec.json.encode(settings, order="sorted"), digest_size=8).hexdigest(),
    )


def figures_path(kind: FiguresKind, folder: Path | None = None) -> Path:
    """Where the figures of such an engine are kept: in `folder`, by default the cache's."""
    return kind_path(kind, "engine-figures", folder)


def load_figures(kind: FiguresKind, folder: Path | None = None) -> EngineFigures | None:
    """What `save_figures` kept for such an engine, marked as cached; None where there is nothing that can be used."""

    def decode(data: bytes) -> EngineFigures:
        content = _decoder.decode(data)
        if content.format != FORMAT or content.kind != kind:
            raise ValueError("it was measured on something else")
        return msgspec.structs.replace(content.figures, cached=True)

    return read_kept(figures_path(kind, folder), decode)


def save_figures(kind: FiguresKind, figures: EngineFigures, folder: Path | None = None) -> None:
    """Keep them; see `cache_files.keep`."""
    keep(figures_path(kind, folder), msgspec.json.encode(_Content(format=FORMAT, kind=kind, figures=figures)))
