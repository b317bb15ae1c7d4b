"""Checks what clients submit, or have explained: whether it can run, and what its prompts are in tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from pingpong_bus.chain import Chain, resolve_inputs, upstreams
from pingpong_bus.chain import validate_chain as check_chain
from pingpong_bus.errors import Overloaded, UsageError
from pingpong_bus.messages import EngineLimits, Explain, OutputOf, PreparedAgent, Submit, SubmitOptions
from pingpong_bus.slab import Slab
from pingpongd.admission import Room, check_fits, check_queue
from pingpongd.calls import check_calls
from pingpongd.config import DaemonConfig
from pingpongd.exactness import Exact, exact
from pingpongd.fleet import Fleet
from pingpongd.hop_room import HopRoom
from pingpongd.model_names import agent_models, check_models, without_default
from pingpongd.placement import place
from pingpongd.seams import most_ids, text_prompts
from pingpongd.shapes import STEP_MS, ChainShape
from pingpongd.speculation import check_speculation

PATIENCE_S = 120.0
"""How long a submission waits for a worker that tokenizes it, where all are just being replaced."""

Reads = tuple[tuple[int, ...], ...]
"""Per agent, the agents it reads."""
Models = Sequence[str | None]
"""Per agent, the name of the model that runs it, "" for the default one; None of a step."""


class Checked(msgspec.Struct, frozen=True):
    """A chain that can be accepted now."""

    chain: Chain
    """As it will be run."""
    inputs: dict[str, str]
    prepared: list[PreparedAgent]
    reads: Reads
    exact: Exact
    engine_models: list[str]
    """Per agent, its engines' model; "" of a step."""

    @property
    def model(self) -> str:
        """The engines' of the first agent that has one."""
        return next(name for name in self.engine_models if name)


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
        check_calls(chain, self.config.calls)
        chain = without_default(chain, self.config.model)
        inputs = resolve_inputs(chain, request.inputs)
        check_queue(self._queued(), self.room)
        check_models(chain, self.config, self._hop_room.models())
        models, reads = agent_models(chain), reads_of(chain)
        check_group(chain, models, options, self._hop_room)
        prepared = await self._prepare(chain, inputs, models, reads, patience)
        self.require_service()  # tokenizing took a moment: once more
        check_queue(self._queued(), self.room)
        check_models(chain, self.config, self._hop_room.models())
        limits = self.limits_of(models)
        check_fits(chain, prepared, limits, self.room)
        for found in limits:
            _check_options(options, found[0].sessions if found else None)
        # Placement is asked once now, so that what cannot be placed is refused, and again when the chain starts. A
        # group whose worker is just being replaced counts: it will be back. What may run anywhere need not ask: with
        # hundreds of groups, views of them all were a tenth of what a chain costs.
        if options.group is not None or options.mode in ("ping-pong", "overlap"):
            any_prompts = ChainShape(
                reads,
                (("", 0),) * len(reads),
                models=tuple(name or "" for name in models) if any(models) else (),
                steps=tuple(STEP_MS if name is None else None for name in models) if None in models else (),
            )
            place(any_prompts, options.mode, self._hop_room.standing(), 0, options.group)
        kept = exact(
            options.exactness or chain.exactness or self.config.exactness,
            mode=options.mode,
            session=options.session,
            engines=self._hop_room.engines(options.group, {name for name in models if name is not None}),
            grid_tokens=self.config.grid_tokens,
        )
        check_speculation(chain, options, kept.level, self._engines(models, options.group))
        return Checked(chain, inputs, prepared, reads, kept, [found[0].model if found else "" for found in limits])

    def _engines(self, models: Models, group: str | None) -> dict[str, list[tuple[str, EngineLimits]]]:
        """By model, the groups that may run agents of it, with their engines' limits."""
        wanted = {name for name in models if name is not None}
        found: dict[str, list[tuple[str, EngineLimits]]] = {}
        for engine in self._hop_room.engines(group, wanted):
            found.setdefault(engine.model, []).append((engine.group, engine.limits))
        return found

    def limits_of(self, models: Models) -> list[list[EngineLimits]]:
        """Per agent, those of the engines that it may be placed on; of a step, none.

        Args:
            models: per agent, the name of its model; None of a step.

        Raises:
            Overloaded: no engine of one of the models has ever served.
        """
        found = {name: self._hop_room.limits(name) for name in dict.fromkeys(models) if name is not None}
        for name, limits in found.items():
            if not limits:
                which = f'the model "{name}"' if name else "the default model"
                raise Overloaded(f"no engine serves {which} now.", hint="See `pingpong-client status`.")
        return [found[name] if name is not None else [] for name in models]

    async def _prepare(
        self, chain: Chain, inputs: dict[str, str], models: Models, reads: Reads, patience: float
    ) -> list[PreparedAgent]:
        """Tokenize a chain, each agent's prompt by a worker of its model, and put them together."""
        tokenizers = self._hop_room.tokenizers(models)
        as_text = text_prompts(chain, reads, tokenizers)
        prepared = [
            PreparedAgent(segments=[OutputOf(agent=at) for at in found]) if name is None else _UNKNOWN
            for name, found in zip(models, reads, strict=True)
        ]
        for name in dict.fromkeys(models):
            if name is None:
                continue
            agents = [at for at, other in enumerate(models) if other == name]
            found = await self._tokenize(chain, inputs, name, agents, as_text, patience)
            for at, one in zip(agents, found, strict=True):
                prepared[at] = one
        most = {
            reader: most_ids(chain, reads, tokenizers, reader, inputs) for reader in {tokenizers[at] for at in as_text}
        }
        for at in as_text:
            counts = {read: most[tokenizers[at]][read] for read in reads[at]}
            prepared[at] = msgspec.structs.replace(prepared[at], text=True, counts=counts)
        return prepared

    async def _tokenize(
        self,
        chain: Chain,
        inputs: dict[str, str],
        model: str,
        agents: list[int],
        as_text: list[int],
        patience: float,
    ) -> list[PreparedAgent]:
        """Tokenize some agents' prompts, as soon as a worker of their model is there that can."""
        whole = len(agents) == len(chain.agents)
        text = [at for at in as_text if at in agents]
        while True:
            fleet = self.require_service()
            try:
                return await fleet.prepare(chain, inputs, model, None if whole else agents, text)
            except Overloaded:
                if any(worker.model == model for worker in self.require_service().ready):
                    raise
                self._served.clear()
                try:
                    async with asyncio.timeout_at(patience):
                        await self._served.wait()
                except TimeoutError:
                    raise Overloaded(
                        "no engine serves now.", hint="Watch `pingpong-client status` until one does."
                    ) from None


_UNKNOWN = PreparedAgent(segments=[])
"""Of a prompt that is still to be tokenized."""


def reads_of(chain: Chain) -> Reads:
    """Per agent, the agents it reads."""
    return tuple(tuple(upstreams(chain, index)) for index in range(len(chain.agents)))


def check_group(chain: Chain, models: Models, options: SubmitOptions, room: HopRoom) -> None:
    """Refuse a named group that does not serve all models of a chain.

    Args:
        chain: the chain.
        models: per agent, the name of its model; None of a step.
        options: of its submission.
        room: says which groups there are.

    Raises:
        UsageError: naming the agent.
    """
    worker = room.fleet.workers.get(options.group) if room.fleet is not None and options.group is not None else None
    if worker is None:
        return
    for agent, name in zip(chain.agents, models, strict=True):
        if name is not None and name != worker.model:
            served = f'the model "{worker.model}"' if worker.model else "the default model"
            raise UsageError(
                f'the group "{worker.name}" serves {served}, and agent "{agent.name}" is another\'s.',
                field="options.group",
                hint="Leave out the group.",
            )


def _check_options(options: SubmitOptions, offered: tuple[str, ...] | None) -> None:
    wanted = options.session
    if options.group is not None and options.mode == "ping-pong":
        raise UsageError(
            "a chain on one named group cannot alternate.", field="mode", hint="Leave out the mode or the group."
        )
    if wanted is not None and offered is not None and wanted not in offered:
        raise UsageError(
            f'the engine offers no session of kind "{wanted}".',
            field="session",
            hint=f"It offers: {', '.join(offered)}.",
        )
