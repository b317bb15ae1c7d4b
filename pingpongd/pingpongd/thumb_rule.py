"""Where a chain's agents run on engines that were not measured. Pure.

They read ahead where there is cold prefill to hide; where the agents' static prefixes already sit in one group's prefix
cache, series is as fast and keeps the other groups free.
"""

from __future__ import annotations

from collections.abc import Sequence

from pingpong_bus.errors import UsageError
from pingpong_bus.messages import Mode
from pingpongd.candidates import able_to_overlap, by_model, by_preference, one_each, ring, without_second
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
    if mode == "ping-pong":
        return Plan("ping-pong", ring(shape, groups, number), asked)
    if mode == "overlap":
        groups = overlapping(shape, groups)
    orders = {model: by_preference(shape, views, number) for model, views in by_model(shape, groups).items()}
    (names,) = one_each(shape, orders, 1)
    if mode in ("overlap", "serial"):
        return Plan(mode, names, asked)
    return _auto_by_thumb(shape, groups, number, names)


def overlapping(shape: ChainShape, groups: Sequence[GroupView]) -> list[GroupView]:
    """Those of the groups on which agents of the chain may overlap.

    Raises:
        UsageError: there are none of some model.
    """
    able = able_to_overlap(shape, found := by_model(shape, groups))
    for model, views in able.items():
        if not views:
            names = ", ".join(view.name for view in found[model])
            raise UsageError(
                f"overlap takes an engine that holds appends to a budget beside decodes, and there is none on {names}.",
                field="mode",
                hint="Set `decode_first.enabled` and no scheduler_cls in the configuration, or vLLM's "
                "`long_prefill_token_threshold`; or submit with another mode.",
            )
    return [view for view in groups if any(view in views for views in able.values())]


def _auto_by_thumb(shape: ChainShape, groups: Sequence[GroupView], number: int, in_series: tuple[str, ...]) -> Plan:
    if len(groups) < 2:
        return Plan("serial", in_series, "one device group")
    if not any(shape.sources()):
        return Plan("serial", in_series, "no agent reads another")
    if (index := without_second(shape, groups)) is not None:
        model = shape.model(index) or "the default model"
        return Plan("serial", in_series, f"one device group of {model}, which two agents in a row take")
    views = {view.name: view for view in groups}
    cold = _cold_downstream_tokens(shape, [views.get(name) for name in in_series])
    where = ", ".join(name for name in dict.fromkeys(in_series) if name)
    if cold < COLD_TOKENS_WORTH_HIDING:
        return Plan(
            "serial",
            in_series,
            f"{cold} cold prefix tokens to hide on {where}, worth it from {COLD_TOKENS_WORTH_HIDING}",
        )
    return Plan("ping-pong", ring(shape, groups, number), f"cold: {cold} prefix tokens to hide")


def _cold_downstream_tokens(shape: ChainShape, places: Sequence[GroupView | None]) -> int:
    return sum(
        length
        for reads, (digest, length), view in zip(shape.upstreams, shape.prefixes, places, strict=True)
        if reads and view is not None and digest not in view.held
    )
