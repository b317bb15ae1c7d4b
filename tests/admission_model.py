"""A daemon boiled down to its rules of admission, step by step, for `test_admission_simulation.py`.

Queue, ledger and full lengths are the daemon's own. Modelled here is what it does with them:

- Waiting chains start in the queue's order, when all their token logs are free.
- An agent is *ready* when every agent that it reads has finished, or is open and has emitted a token; in series, when
  every earlier agent has finished; in a chain that starts at once, when those that it reads are open.
- In a group, ready agents open interrupted ones first, then by the age of their chain; the first that does not fit its
  group's ledger holds up those behind it. Agents that are not ready hold up nobody.
- A chain may be on the grid: its hops open in a group where nothing is open, and nothing opens beside them.
- A lost worker interrupts the group's hops. What reads an agent that is not open again at once, and has written
  nothing, gives its memory back and gets ready anew.

In a step an open hop reads up to `READ` prompt tokens, or, once its upstreams have finished, writes one token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import EngineLimits, Literals, OutputOf, PreparedAgent, Segment
from pingpongd.chain_queue import ChainQueue
from pingpongd.ledger import GroupLedger, hop_tokens

READ = 64
STEP_NS = 1_000_000_000
"""A step is called a second."""


class Deadlock(AssertionError):
    """Every group serves, chains wait, and nothing can move."""


@dataclass(frozen=True)
class Shape:
    """A chain to be run."""

    reads: tuple[tuple[int, ...], ...]
    """Per agent, the agents it reads."""
    literal: tuple[int, ...]
    longest: tuple[int, ...]
    """Per agent, its `max_tokens`."""
    output: tuple[int, ...]
    """Per agent, what it really writes."""
    serial: bool = False
    immediate: bool = False
    overlap: bool = False
    """Its agents share a group."""
    grid: bool = False


@dataclass
class ModelAgent:
    group: int
    read: int = 0
    """Prompt tokens that its hop has computed."""
    written: int = 0
    open: bool = False
    interrupted: bool = False
    finished: bool = False


@dataclass
class ModelChain:
    number: int
    shape: Shape
    submitted: int
    chain: Chain
    prepared: list[PreparedAgent]
    agents: list[ModelAgent] = field(default_factory=list)
    started: int | None = None
    ended: int | None = None

    def ready(self, index: int) -> bool:
        agent, agents = self.agents[index], self.agents
        if agent.open or agent.finished:
            return False
        if self.shape.serial:
            return all(other.finished for other in agents[:index])
        immediate = self.shape.immediate
        return all(
            agents[at].finished or (agents[at].open and (agents[at].written > 0 or immediate))
            for at in self.shape.reads[index]
        )

    def tokens(self, index: int) -> int:
        written = {at: agent.written for at, agent in enumerate(self.agents) if agent.finished}
        return hop_tokens(self.chain, self.prepared, index, written)


class Model:
    """Chains on groups."""

    def __init__(
        self, limits: list[EngineLimits], slots: int, *, seed: int = 0, aging_s: float = 30.0, gives_back: bool = True
    ) -> None:
        self.limits = limits
        self.ledgers = [GroupLedger(limit) for limit in limits]
        self.up = [True] * len(limits)
        self.slots = self.free_slots = slots
        self.queue = ChainQueue(aging_s)
        self.waiting: dict[str, ModelChain] = {}
        self.running: dict[str, ModelChain] = {}
        self.ended: list[ModelChain] = []
        self.now = 0
        self.tokens = 0
        self._count = 0
        self._random = random.Random(seed)
        self._gives_back = gives_back

    # -------------------------------------------------------------------------------------------------- from outside

    def submit(self, shape: Shape, *, priority: int = 0, deadline: int | None = None) -> str:
        self._count += 1
        name = str(self._count)
        agents = [Agent(name=f"a{at}", prompt="x", max_tokens=most) for at, most in enumerate(shape.longest)]
        prepared = []
        for literal, reads in zip(shape.literal, shape.reads, strict=True):
            segments: list[Segment] = [Literals(ids=[1] * literal), *(OutputOf(agent=at) for at in reads)]
            prepared.append(PreparedAgent(segments=segments))
        chain = ModelChain(self._count, shape, self.now, Chain(name=name, agents=agents), prepared)
        self.waiting[name] = chain
        self.queue.add(
            name,
            priority=priority,
            deadline_ns=None if deadline is None else deadline * STEP_NS,
            since_ns=self.now * STEP_NS,
            slots=len(agents),
        )
        return name

    def cancel(self, name: str) -> None:
        self.queue.remove(name)
        if (chain := self.waiting.pop(name, None)) is None:
            chain = self.running.pop(name)
            for index in range(len(chain.agents)):
                self._close(name, index)
            self.free_slots += len(chain.agents)
        chain.ended = self.now
        self.ended.append(chain)

    def lose(self, group: int, *, back: bool, move: bool) -> None:
        """The group's worker is gone; it is `back` at once or not, and its hops `move` to other groups or wait."""
        self.ledgers[group] = GroupLedger(self.limits[group])
        self.up[group] = back
        others = [at for at, up in enumerate(self.up) if up] or [group]
        for chain in self.running.values():
            for agent in chain.agents:
                if agent.group == group and agent.open:
                    agent.open, agent.interrupted, agent.read = False, True, 0
                    if move and not chain.shape.serial:
                        agent.group = self._random.choice(others)

    def restore(self, group: int) -> None:
        self.up[group] = True

    # ------------------------------------------------------------------------------------------------------ the rules

    def step(self) -> None:
        """Let one step pass.

        Raises:
            Deadlock: nothing can move any more.
        """
        self.now += 1
        moved = self._start()
        moved |= self._open()
        if self._gives_back and self._give_back():
            moved = True
            self._open()
        for name, chain in list(self.running.items()):
            for index, agent in enumerate(chain.agents):
                if agent.open:
                    moved |= self._advance(name, chain, index, agent)
            if all(agent.finished for agent in chain.agents):
                del self.running[name]
                chain.ended = self.now
                self.ended.append(chain)
                self.free_slots += len(chain.agents)
        if not moved and all(self.up) and (self.running or self.waiting):
            raise Deadlock(self.picture())

    def _start(self) -> bool:
        for name in self.queue.expired(self.now * STEP_NS):
            self.ended.append(self.waiting.pop(name))
        started = False
        while (name := self.queue.next(self.now * STEP_NS, self.free_slots)) is not None:
            self.running[name] = chain = self.waiting.pop(name)
            chain.started = self.now
            chain.agents = self._placed(chain.shape, chain.number)
            self.free_slots -= len(chain.agents)
            started = True
        return started

    def _placed(self, shape: Shape, number: int) -> list[ModelAgent]:
        count = len(self.limits)
        if shape.serial or shape.overlap:
            return [ModelAgent(number % count) for _ in shape.reads]
        agents: list[ModelAgent] = []
        for index, reads in enumerate(shape.reads):
            agents.append(ModelAgent((agents[max(reads)].group + 1 if reads else number + index) % count))
        return agents

    def _open(self) -> bool:
        opened = False
        while True:
            opens = [self._open_in(group) for group, up in enumerate(self.up) if up]
            if not any(opens):
                return opened
            opened = True

    def _open_in(self, group: int) -> bool:
        line = sorted(
            (not chain.agents[index].interrupted, chain.number, index, name)
            for name, chain in self.running.items()
            for index in range(len(chain.agents))
            if chain.agents[index].group == group and chain.ready(index)
        )
        opened = False
        for _, _, index, name in line:
            chain = self.running[name]
            beside = self._opened()[group]
            if any(other.shape.grid for other in beside) or (chain.shape.grid and beside):
                break
            if not self.ledgers[group].take(f"{name}/{index}", chain.tokens(index)):
                break
            chain.agents[index].open, chain.agents[index].interrupted = True, False
            opened = True
        return opened

    def _give_back(self) -> bool:
        """Close what reads an agent that is neither open nor finished."""
        closed = False
        for name, chain in self.running.items():
            for index, agent in enumerate(chain.agents):  # upstreams come first, so that one pass is transitive
                reads = [chain.agents[at] for at in chain.shape.reads[index]]
                if agent.open and not all(other.open or other.finished for other in reads):
                    assert agent.written == 0, "a hop wrote before its upstreams had finished"
                    self._close(name, index)
                    closed = True
        return closed

    def _advance(self, name: str, chain: ModelChain, index: int, agent: ModelAgent) -> bool:
        shape = chain.shape
        reads = [chain.agents[at] for at in shape.reads[index]]
        there = shape.literal[index]
        for other in reads:  # segments are read in order: a later one waits for the end of those before it
            there += other.written
            if not other.finished:
                break
        there += agent.written if all(other.finished for other in reads) else 0
        if agent.read < there:
            agent.read = min(there, agent.read + READ)
            return True
        if not all(other.finished for other in reads):
            return False
        agent.written += 1
        agent.read += 1
        self.tokens += 1
        if agent.written == shape.output[index]:
            agent.finished = True
            self._close(name, index)
        return True

    def _close(self, name: str, index: int) -> None:
        agent = self.running[name].agents[index] if name in self.running else None
        if agent is not None:
            agent.open, agent.read = False, 0
        for ledger in self.ledgers:
            ledger.give_back(f"{name}/{index}")

    def _opened(self) -> list[list[ModelChain]]:
        """By group, the chain of each open hop."""
        opened: list[list[ModelChain]] = [[] for _ in self.limits]
        for chain in self.running.values():
            for agent in chain.agents:
                if agent.open:
                    opened[agent.group].append(chain)
        return opened

    # -------------------------------------------------------------------------------------------------------- to look

    def check(self) -> None:
        """What must hold after every step."""
        assert self.free_slots == self.slots - sum(len(chain.agents) for chain in self.running.values())
        opened: list[set[str]] = [set() for _ in self.limits]
        for name, chain in self.running.items():
            for index, agent in enumerate(chain.agents):
                if agent.open:
                    opened[agent.group].add(f"{name}/{index}")
                    if self._gives_back:
                        assert all(
                            chain.agents[at].open or chain.agents[at].finished for at in chain.shape.reads[index]
                        )
        for beside in self._opened():
            assert len(beside) < 2 or not any(chain.shape.grid for chain in beside)
        for group, ledger in enumerate(self.ledgers):
            assert set(ledger.held) == opened[group]
            assert ledger.free_tokens >= 0
            assert ledger.free_seqs >= 0

    def picture(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"step {self.now}: {len(self.running)} chains run, {len(self.waiting)} wait, {self.free_slots} slots free"
        for group, ledger in enumerate(self.ledgers):
            yield f"group {group}: {ledger.free_tokens} tokens, {ledger.free_seqs} sequences free; held {ledger.held}"
        for name, chain in self.running.items():
            yield f"chain {name} {chain.shape.reads}: {chain.agents}"
