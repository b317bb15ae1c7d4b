"""What is promised of a chain's output, and whether the engines can keep it. Pure.

========== ==================================================== =====================================================
level      promises                                             takes
========== ==================================================== =====================================================
fast       nothing of the last bit                              nothing
grid       the same ids in series and read ahead                prompts cut on one grid, a hop alone on its group
invariant  the same ids whatever runs beside it                 vLLM's batch-invariant kernels
========== ==================================================== =====================================================

Both exact levels take engines of one kind for each model: others round differently, and any of them may have to finish
what another one has begun.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pingpong_bus.chain import Exactness
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import EngineLimits, Mode, SessionKind

_NO_MATTER = frozenset(
    {
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "VLLM_CPU_KVCACHE_SPACE"),
        *("download_dir", "hf_token", "HF_HOME", "HF_TOKEN", "VLLM_LOGGING_LEVEL"),
    }
)
"""Arguments and variables of vLLM's that say how much is cached, where a model is found and what is logged, and touch
no result."""


class EngineKind(msgspec.Struct, frozen=True):
    """What an engine's rounding depends on, beside how it is used."""

    engine: str
    model: str
    dtype: str
    device: str
    """With how many of them: a tensor-parallel engine adds up in another order."""
    arguments: dict[str, Any] = {}
    """Raw ones that it is given: an engine that is compiled rounds unlike one that is not."""
    environment: str = ""
    """Digest of the variables that it is given, which may be secrets; a backend is chosen by some."""
    batch_invariant: bool = False

    def __str__(self) -> str:
        own = "".join(f", {name} = {value}" for name, value in self.arguments.items())
        own += f", environment {self.environment}" if self.environment else ""
        own += ", batch-invariant" if self.batch_invariant else ""
        dtype, device = self.dtype or "dtype unknown", self.device or "device unknown"
        return f"{self.engine}, {self.model}, {dtype}, {device}{own}"


class GroupEngine(msgspec.Struct, frozen=True):
    """A group's engine, as exactness sees it."""

    group: str
    limits: EngineLimits
    kind: EngineKind
    model: str = ""
    """One of `[models]`, by name; empty: the default one."""


_AS_IT_WAS = "it waits for the configuration that it was accepted with, and can be cancelled"
_GRID_HINT = (
    'Take exactness "fast", or change what keeps the engine from it (`grid_tokens`, `[decode_first]`, `[vllm]`) and '
    "start the daemon anew."
)


class Exact(msgspec.Struct, frozen=True):
    """What a chain was accepted at; kept with it, so that it goes on alike after a restart."""

    level: Exactness = "fast"
    grid: int | None = None
    """The cell in tokens, at level "grid"."""
    kind: EngineKind | None = None
    """Of the engines that may run it; None at level "fast": any."""
    others: list[EngineKind] = []
    """Of those of its other models, each of which has a kind of its own."""

    def allows(self, kind: EngineKind) -> bool:
        """Whether an engine of this kind may run it."""
        return self.kind is None or kind in (self.kind, *self.others)

    @property
    def kinds(self) -> str:
        """Of all that may run it, for people."""
        return "; ".join(map(str, (self.kind, *self.others)))


def engine_kind(limits: EngineLimits, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> EngineKind:
    """The kind of an engine.

    Args:
        limits: what it reports.
        arguments: raw ones that it is given, by the daemon's configuration and by its group's.
        environment: variables, likewise.
    """
    told = {name: value for name, value in arguments.items() if name not in _NO_MATTER}
    variables = sorted((name, value) for name, value in environment.items() if name not in _NO_MATTER)
    return EngineKind(
        limits.engine,
        limits.model,
        limits.dtype,
        limits.device,
        told,
        hashlib.sha256(repr(variables).encode()).hexdigest()[:8] if variables else "",
        limits.batch_invariant,
    )


def exact(
    level: Exactness,
    *,
    mode: Mode,
    session: SessionKind | None,
    engines: Sequence[GroupEngine],
    grid_tokens: int | None,
) -> Exact:
    """How a chain's level is kept.

    Args:
        level: of the submission, else of the chain, else the daemon's default.
        mode: that the submission asks for.
        session: the kind that it asks for; None: the engine's default.
        engines: of the groups that the chain may run on, those of each of its models; at least one.
        grid_tokens: the configured cell; None: the largest that the engines like best.

    Raises:
        UsageError: the level cannot be kept, and why.
    """
    if level == "fast":
        return Exact()
    firsts: dict[str, GroupEngine] = {}
    for other in engines:
        first = firsts.setdefault(other.model, other)
        if other.kind != first.kind:
            raise _refused(
                level,
                f'the groups "{first.group}" ({first.kind}) and "{other.group}" ({other.kind}) round differently',
                'Name one of the groups, or submit with exactness "fast".',
            )
    kinds = [first.kind for first in firsts.values()]
    if level == "invariant":
        for engine in engines:
            if not engine.limits.batch_invariant:
                raise _refused(
                    level,
                    f'the engine of group "{engine.group}" does not run batch-invariant kernels',
                    "Set `batch_invariant = true` in the daemon's configuration and start it anew.",
                )
        return Exact(level, kind=kinds[0], others=kinds[1:])
    if mode == "overlap":
        raise _refused(
            level,
            'with placement "overlap" agents share a device, and a hop has to have it to itself',
            'Take exactness "invariant" or "fast", or another mode.',
        )
    for engine in engines:
        if not engine.limits.grid_tokens:
            why = engine.limits.grid_refusal or "it cannot be held to a grid"
            raise _refused(level, f'the engine of group "{engine.group}": {why.rstrip(".")}', _GRID_HINT)
        if (session or engine.limits.sessions[0]) == "streaming-input":
            raise _refused(
                level,
                "a streaming-input session cuts its prompt where chunks end",
                'Ask for the session "prefix-cache".',
            )
    cell = grid_tokens or max(engine.limits.grid_tokens for engine in engines)
    return Exact(level, cell, kinds[0], kinds[1:])


def unkept(kept: Exact, *, session: SessionKind | None, mode: Mode, engines: Sequence[GroupEngine]) -> str:
    """Why a chain that was accepted cannot run on these engines, with the way out; empty where it can.

    Args:
        kept: what it was accepted at.
        session: as for `exact`.
        mode: as for `exact`.
        engines: as for `exact`; where there are none now, there may be some later.
    """
    if kept.level == "fast" or not engines:
        return ""
    try:
        exact(kept.level, mode=mode, session=session, engines=engines, grid_tokens=kept.grid)
    except UsageError as error:
        return f"{error.message.rstrip('.')}; {_AS_IT_WAS}"
    unlike = next((engine.kind for engine in engines if not kept.allows(engine.kind)), None)
    if unlike is None:
        return ""
    return f'it was accepted at exactness "{kept.level}" for {kept.kinds}, and the daemon serves {unlike}; {_AS_IT_WAS}'


def _refused(level: Exactness, why: str, hint: str) -> UsageError:
    return UsageError(f'exactness "{level}" cannot be kept: {why}.', field="exactness", hint=hint)
