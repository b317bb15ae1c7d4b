"""What a chain's placements should take and what would make it faster, without running it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pingpong_bus.messages import Advice, Explain, Explained, Literals
from pingpongd.advice import advise
from pingpongd.intake import PATIENCE_S, Checked, Intake
from pingpongd.planner import Planner, Preview
from pingpongd.shapes import ChainShape, submitted_shape


class Explainer:
    """Answers `Explain`; belongs to one event loop."""

    def __init__(self, intake: Intake, planner: Planner) -> None:
        """Args:
        intake: checks chains as submissions are.
        planner: predicts them.
        """
        self._intake = intake
        self._planner = planner
        self._advising = asyncio.Lock()
        """Advice takes the interpreter from all else: one at a time, whoever asks for it."""

    async def explain(self, request: Explain, number: int) -> Explained:
        """Answer a request; nothing is kept or run.

        Args:
            request: the chain.
            number: the `ChainRecord.number` that it would have, were it accepted now.

        Raises:
            PingpongError: it could not be accepted now.
        """
        checked = await self._intake.check(request, asyncio.get_running_loop().time() + PATIENCE_S)
        chain, options = checked.chain, request.options
        shape = submitted_shape(chain, options, checked.reads, checked.prepared, checked.exact.grid)
        shape = self._planner.informed(shape, chain, options, checked.exact.level)
        names = [agent.name for agent in chain.agents]
        async with self._advising:
            preview = self._planner.preview(shape, options.mode, options.group, number)
            workers = self._intake.require_service().workers.values()
            devices = {worker.name: worker.group.devices for worker in workers}
            # It reads every token, while others' events go on.
            advice = await asyncio.to_thread(_advice, shape, checked, names, preview, devices)
        return Explained(
            request=request.request,
            predictions=preview.predictions,
            chosen=preview.plan.predicted,
            placement=preview.plan.placement,
            why=preview.plan.why,
            advice=advice,
        )


def _advice(
    shape: ChainShape,
    checked: Checked,
    names: Sequence[str],
    preview: Preview,
    devices: Mapping[str, Sequence[str]],
) -> list[Advice]:
    texts = [
        [token for part in agent.segments if isinstance(part, Literals) for token in part.ids]
        for agent in checked.prepared
    ]
    notes = [agent.note for agent in checked.prepared]
    return advise(shape, texts, preview.predictions, preview.groups, names=names, notes=notes, devices=devices)
