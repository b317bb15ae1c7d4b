"""Where a chain's agents run on engines that were not measured. Pure.

They read ahead where there is cold prefill to hide; where the agents' static prefixes already sit in one group's prefix
cache, series is as fast and keeps the other groups free.
"""

from __future__ import annotations

from collections.abc import Sequence

from pingpong_bus.errors import UsageError
from pingpong_bus.messages import Mode
from pingpongd.candidates import by_preference, ring
from pingpongd.plan import Plan
from pingpongd.shapes import ChainShape, GroupView

COLD_TOKENS_WORTH_HIDING = 256
"""``auto`` takes series where fewer downstream prefix tokens than this are cold: prefilling them takes
about as long as what a second busy device costs in decode time (some percent of a chain of a few hundred decode
steps)."""


def by_thumb(shape: ChainShape, mode: Mode, groups: Sequence[GroupView], number: int, asked: str) -> Plan:
    """What is planned where nothing was measured.

    Args:
        shape: the chain.
        mode: what its submission asks for.
        groups: to choose from, enough for the mode.
        number: the chain's.
        asked: why the mode is as it is, in words.

    Raises:
        UsageError: agents are to overlap, and can on none of them.
    """
    count = len(shape.upstreams)
    if mode == "overlap":
        best = by_preference(shape, overlapping(groups), number)[0]
        return Plan("overlap", (best.name,) * count, asked)
    if mode == "ping-pong":
        return Plan("ping-pong", ring(shape, groups, number), asked)
    serial = by_preference(shape, groups, number)[0]
    if mode == "serial":
        return Plan("serial", (serial.name,) * count, asked)
    return _auto_by_thumb(shape, groups, number, serial)


def overlapping(groups: Sequence[GroupView]) -> list[GroupView]:
    """Those of the groups on which agents may overlap.

    Raises:
        UsageError: there is none.
    """
    found = [view for view in groups if view.overlap]
    if not found:
        names = ", ".join(view.name for view in groups)
        raise UsageError(
            f"overlap takes an engine that holds appends to a budget beside decodes, and there is none on {names}.",
            field="mode",
            hint="Set `decode_first.enabled` and no scheduler_cls in the configuration, or vLLM's "
            "`long_prefill_token_threshold`; or submit with another mode.",
        )
    return found


def _auto_by_thumb(shape: ChainShape, groups: Sequence[GroupView], number: int, serial: GroupView) -> Plan:
    in_series = (serial.name,) * len(shape.upstreams)
    if len(groups) < 2:
        return Plan("serial", in_series, "one device group")
    if not any(shape.upstreams):
        return Plan("serial", in_series, "no agent reads another")
    cold = _cold_downstream_tokens(shape, serial)
    if cold < COLD_TOKENS_WORTH_HIDING:
        return Plan(
            "serial",
            in_series,
            f"{cold} cold prefix tokens to hide on {serial.name}, worth it from {COLD_TOKENS_WORTH_HIDING}",
        )
    return Plan("ping-pong", ring(shape, groups, number), f"cold: {cold} prefix tokens to hide")


def _cold_downstream_tokens(shape: ChainShape, view: GroupView) -> int:
    return sum(
        length
        for reads, (digest, length) in zip(shape.upstreams, shape.prefixes, strict=True)
        if reads and digest not in view.held
    )
