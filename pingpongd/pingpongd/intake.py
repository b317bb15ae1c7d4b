"""Checks what clients submit, or have explained: whether it can run, and what its prompts are in tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pingpong_bus.chain import Chain, resolve_inputs, upstreams
from pingpong_bus.chain import validate_chain as check_chain
from pingpong_bus.errors import Overloaded, UsageError
from pingpong_bus.messages import Explain, PreparedAgent, Submit, SubmitOptions
from pingpong_bus.slab import Slab
from pingpongd.admission import Room, check_fits, check_queue
from pingpongd.config import DaemonConfig
from pingpongd.exactness import Exact, exact
from pingpongd.fleet import Fleet
from pingpongd.hop_room import HopRoom
from pingpongd.placement import place
from pingpongd.shapes import ChainShape

PATIENCE_S = 120.0
"""How long a submission waits for a worker that tokenizes it, where all are just being replaced."""

Reads = tuple[tuple[int, ...], ...]
"""Per agent, the agents it reads."""


class Checked(msgspec.Struct, frozen=True):
    """A chain that can be accepted now."""

    inputs: dict[str, str]
    prepared: list[PreparedAgent]
    reads: Reads
    exact: Exact
    model: str
    """The engines'."""


class Intake:
    """Says whether chains can be taken; belongs to one event loop."""

    def __init__(self, config: DaemonConfig, room: HopRoom, slab: Slab, queued: Callable[[], int]) -> None:
        """Args:
        config: the daemon's.
        room: of the groups.
        slab: where token logs are.
        queued: how many chains wait.
        """
        self.config = config
        self.closed = False
        """No chain is accepted any more."""
        self._hop_room = room
        self._slab = slab
        self._queued = queued
        self._served = asyncio.Event()
        """Set when a group begins to serve, and when none will for this daemon's chains."""

    @property
    def room(self) -> Room:
        """What a chain has to fit into."""
        return Room(self._slab.slots, self._slab.capacity, self.config.max_queued)

    def look_again(self) -> None:
        """A group has begun to serve, or none will: those that wait for one are to look."""
        self._served.set()

    def require_service(self) -> Fleet:
        """The fleet.

        Raises:
            Overloaded: no new work is taken: engines load for the first time, or the daemon is draining.
        """
        if self.closed:
            raise Overloaded("the daemon is shutting down.", hint="Submit again once it is back.")
        if self._hop_room.fleet is None:
            raise Overloaded("no engine serves yet.", hint="Watch `pingpong-client status` until one does.")
        return self._hop_room.fleet

    async def check(self, request: Submit | Explain, patience: float) -> Checked:
        """Check and tokenize a chain.

        Args:
            request: that has it.
            patience: the loop's time until which a worker that tokenizes is waited for.

        Raises:
            PingpongError: it cannot run, or not now.
        """
        chain, options = request.chain, request.options
        self.require_service()
        check_chain(chain)
        inputs = resolve_inputs(chain, request.inputs)
        check_queue(self._queued(), self.room)
        prepared = await self._prepare(chain, inputs, patience)
        self.require_service()  # tokenizing took a moment: once more
        check_queue(self._queued(), self.room)
        limits = self._hop_room.limits()
        check_fits(chain, prepared, limits, self.room)
        _check_options(options, limits[0].sessions)
        reads = reads_of(chain)
        # Placement is asked once now, so that what cannot be placed is refused, and again when the chain starts. A
        # group whose worker is just being replaced counts: it will be back. What may run anywhere need not ask: with
        # hundreds of groups, views of them all were a tenth of what a chain costs.
        if options.group is not None or options.mode in ("ping-pong", "overlap"):
            any_prompts = ChainShape(reads, (("", 0),) * len(reads))
            place(any_prompts, options.mode, self._hop_room.standing(), 0, options.group)
        kept = exact(
            options.exactness or chain.exactness or self.config.exactness,
            mode=options.mode,
            session=options.session,
            engines=self._hop_room.engines(options.group),
            grid_tokens=self.config.grid_tokens,
        )
        return Checked(inputs, prepared, reads, kept, limits[0].model)

    async def _prepare(self, chain: Chain, inputs: dict[str, str], patience: float) -> list[PreparedAgent]:
        """Tokenize a chain, as soon as a worker is there that can."""
        while True:
            fleet = self.require_service()
            try:
                return await fleet.prepare(chain, inputs)
            except Overloaded:
                if self.require_service().ready:
                    raise
                self._served.clear()
                try:
                    async with asyncio.timeout_at(patience):
                        await self._served.wait()
                except TimeoutError:
                    raise Overloaded(
                        "no engine serves now.", hint="Watch `pingpong-client status` until one does."
                    ) from None


def reads_of(chain: Chain) -> Reads:
    """Per agent, the agents it reads."""
    return tuple(tuple(upstreams(chain, index)) for index in range(len(chain.agents)))


def _check_options(options: SubmitOptions, offered: tuple[str, ...]) -> None:
    wanted = options.session
    if options.group is not None and options.mode == "ping-pong":
        raise UsageError(
            "a chain on one named group cannot alternate.", field="mode", hint="Leave out the mode or the group."
        )
    if wanted is not None and wanted not in offered:
        raise UsageError(
            f'the engine offers no session of kind "{wanted}".',
            field="session",
            hint=f"It offers: {', '.join(offered)}.",
        )
