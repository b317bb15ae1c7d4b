"""Keeps what an engine was measured to take, so that its next start need not measure; see `cache_files.py`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from pingpong_bus.messages import EngineFigures, EngineLimits
from pingpong_worker.cache_files import EngineKind, keep, kind_path, read_kept
from pingpong_worker.config import WorkerConfig

FORMAT: Final = 1
"""Raised when figures come to mean something else, or are measured otherwise."""
_MOST_TOKENS: Final = 1 << 31
_MOST_MS: Final = 600_000.0
"""Nothing that is measured may take as long."""

_log = logging.getLogger(__name__)


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
    """What `save_figures` kept for such an engine, marked as cached.

    None where there is nothing, and where it is no good: a line in the log then says why. What placements are predicted
    from has to be what can be measured, whoever wrote the file.
    """

    def decode(data: bytes) -> EngineFigures:
        content = _decoder.decode(data)
        if content.format != FORMAT or content.kind != kind:
            raise ValueError("it was measured on something else")
        _check(content.figures)
        return msgspec.structs.replace(content.figures, cached=True)

    return read_kept(figures_path(kind, folder), decode)


def save_figures(kind: FiguresKind, figures: EngineFigures, folder: Path | None = None) -> None:
    """Keep them; see `cache_files.keep`."""
    keep(figures_path(kind, folder), msgspec.json.encode(_Content(format=FORMAT, kind=kind, figures=figures)))


def drop_figures(kind: FiguresKind, folder: Path | None = None) -> None:
    """Have the next start of such an engine measure it."""
    path = figures_path(kind, folder)
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        return
    except OSError as error:
        _log.warning("%s is not removed: %s", path, error)


def _check(figures: EngineFigures) -> None:
    """Raises:
    ValueError: no engine can have been measured to take that.
    """
    datetime.fromisoformat(figures.measured_at)
    if not figures.prefill or not figures.decode:
        raise ValueError("it has no times of prefill or of decoding")
    _check_table("prefill", figures.prefill)
    _check_table("finalize", figures.finalize)
    _check_table("decode", figures.decode)
    _check_table("batch", figures.batch)
    for one in figures.beside:
        if not (0 <= one.context < _MOST_TOKENS and 0 < one.tokens < _MOST_TOKENS and one.itl_ratio >= 1):
            raise ValueError(f"beside: no tokens are appended like {one}")
        _check_times("beside", [one.append_ms, one.decode_ms])
    if not 0 <= figures.step_p50_ms <= figures.step_p99_ms < _MOST_MS:
        raise ValueError(f"no steps take {figures.step_p50_ms:g} ms at p50 and {figures.step_p99_ms:g} at p99")


def _check_table(name: str, rows: Sequence[tuple[float, ...]]) -> None:
    """Counts, and then ms; raises as `_check` does."""
    counts = [row[:-1] for row in rows]
    if not all(0 < count < _MOST_TOKENS for row in counts for count in row):
        raise ValueError(f"{name}: there is nothing of such a length: {counts}")
    if any(later <= earlier for earlier, later in pairwise(counts)):
        raise ValueError(f"{name}: its lengths do not rise: {counts}")
    _check_times(name, [row[-1] for row in rows])


def _check_times(name: str, times_ms: Sequence[float]) -> None:
    if not all(0 < ms < _MOST_MS for ms in times_ms):
        raise ValueError(f"{name}: nothing takes such times: {times_ms} ms")
