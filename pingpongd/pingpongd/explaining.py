"""What a chain's placements should take and what would make it faster, without running it."""

from __future__ import annotations

import asyncio

from pingpong_bus.messages import Explain, Explained, Literals
from pingpongd.advice import advise
from pingpongd.hop_room import HopRoom
from pingpongd.intake import PATIENCE_S, Intake
from pingpongd.planner import Planner
from pingpongd.shapes import submitted_shape


async def explain(request: Explain, intake: Intake, planner: Planner, room: HopRoom, number: int) -> Explained:
    """Answer an `Explain`.

    Args:
        request: the chain, checked as a submission is.
        intake: checks it.
        planner: predicts it.
        room: says which groups there are.
        number: the chain's, were it accepted now.

    Raises:
        PingpongError: it could not be accepted now.
    """
    checked = await intake.check(request, asyncio.get_running_loop().time() + PATIENCE_S)
    chain, options = request.chain, request.options
    shape = submitted_shape(chain, options, checked.reads, checked.prepared, checked.exact.grid)
    plan, predictions = planner.preview(shape, options.mode, options.group, number)
    texts = [
        [token for part in agent.segments if isinstance(part, Literals) for token in part.ids]
        for agent in checked.prepared
    ]
    workers = intake.require_service().workers.values()
    advice = await asyncio.to_thread(  # it reads every token, while others' events go on
        advise,
        shape,
        texts,
        predictions,
        room.groups(),
        names=[agent.name for agent in chain.agents],
        notes=[agent.note for agent in checked.prepared],
        devices={worker.name: worker.group.devices for worker in workers},
    )
    return Explained(
        request=request.request,
        predictions=predictions,
        chosen=plan.predicted,
        placement=plan.placement,
        why=plan.why,
        advice=advice,
    )
