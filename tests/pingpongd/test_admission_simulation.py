"""Admission cannot lock up, starve or collapse: many chains on few slots and tiny ledgers, with all that goes wrong."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from admission_model import Deadlock, Model, ModelChain, Shape
from pingpong_bus.messages import EngineLimits

FAN_IN = ((), (), (), (), (0, 1, 2, 3))
BLOCK = 16
BOUND = 100_000
"""Steps; the chains of one test need some thousand."""


def limits(kv_tokens: int, seqs: int) -> EngineLimits:
    return EngineLimits(
        engine="model",
        model="none",
        max_model_len=kv_tokens,
        vocabulary_size=2,
        block_size=BLOCK,
        kv_tokens=kv_tokens,
        max_num_seqs=seqs,
    )


def series(agents: int) -> tuple[tuple[int, ...], ...]:
    return tuple((at - 1,) if at else () for at in range(agents))


def graph(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Any graph of at most seven agents that read at most three each."""
    return tuple(tuple(sorted(rng.sample(range(at), rng.randint(0, min(at, 3))))) for at in range(rng.randint(1, 7)))


def sized(rng: random.Random, reads: tuple[tuple[int, ...], ...], longest: int, **how: bool) -> Shape:
    most = tuple(rng.randint(1, longest) for _ in reads)
    return Shape(
        reads, tuple(rng.randint(1, 40) for _ in reads), most, tuple(rng.randint(1, one) for one in most), **how
    )


def mixed(rng: random.Random) -> Shape:
    reads = rng.choice([series(rng.randint(1, 6)), FAN_IN, graph(rng)])
    return sized(rng, reads, 24, serial=rng.random() < 0.25, immediate=rng.random() < 0.25)


def exact(rng: random.Random) -> Shape:
    """Of any form; half of them on the grid, and of the others one in four overlaps."""
    shape = mixed(rng)
    grid = rng.random() < 0.5
    return replace(shape, grid=grid, overlap=not grid and rng.random() < 0.25)


def ping_pong(rng: random.Random) -> Shape:
    return sized(rng, series(5), 24)


def giants(rng: random.Random) -> Shape:
    """One in ten is many times longer than the others."""
    return sized(rng, series(4), 120 if rng.random() < 0.1 else 12)


def least_cache(shapes: list[Shape]) -> int:
    """Tokens of the smallest KV cache on which each of the chains can run."""
    longest = 0
    for shape in shapes:
        for literal, reads, most in zip(shape.literal, shape.reads, shape.longest, strict=True):
            longest = max(longest, literal + sum(shape.longest[at] for at in reads) + most)
    return -(-longest // BLOCK) * BLOCK


def run(
    seed: int,
    *,
    chains: int = 60,
    faults: bool = True,
    gives_back: bool = True,
    make: Callable[[random.Random], Shape] = mixed,
) -> Model:
    """Run chains of every form on one to four groups, and lose workers and cancel chains as the seed says."""
    rng = random.Random(seed)
    groups = rng.randint(1, 4)
    shapes = [make(rng) for _ in range(chains)]
    cache = least_cache(shapes)
    engines = [limits(cache + BLOCK * rng.randint(0, 5), rng.randint(1, 4)) for _ in range(groups)]
    model = Model(engines, slots=rng.randint(7, 30), seed=seed, gives_back=gives_back)
    for shape in shapes:
        model.submit(shape, priority=rng.randint(-3, 3))
    back: dict[int, int] = {}
    while model.running or model.waiting:
        assert model.now < BOUND, model.picture()
        if faults and rng.random() < 0.03:
            lost, steps = rng.randrange(groups), rng.choice([0, 0, 3, 20])
            model.lose(lost, back=not steps, move=rng.random() < 0.5)
            if steps:
                back[lost] = model.now + steps
        if faults and rng.random() < 0.01 and (alive := [*model.running, *model.waiting]):
            model.cancel(rng.choice(alive))
        for lost in [one for one, at in back.items() if at <= model.now]:
            model.restore(lost)
            del back[lost]
        model.step()
        model.check()
    return model


@pytest.mark.parametrize("make", [mixed, exact])
@pytest.mark.parametrize("seed", range(60))
def test_all_chains_end_and_nothing_is_held(seed: int, make: Callable[[random.Random], Shape]) -> None:
    model = run(seed, make=make)
    assert len(model.ended) == 60
    assert model.free_slots == model.slots
    assert not any(ledger.held for ledger in model.ledgers)
    assert len(model.queue) == 0


def test_without_faults_every_token_is_written_once() -> None:
    for seed in range(10):
        model = run(seed, faults=False)
        assert model.tokens == sum(sum(chain.shape.output) for chain in model.ended)


def test_readers_of_what_is_interrupted_must_give_back() -> None:
    """The rule is needed: where readers kept their memory, some of these runs lock up."""
    locked = 0
    for seed in range(60):
        try:
            run(seed, gives_back=False)
        except Deadlock:
            locked += 1
    assert locked


def interrupted_pair(*, gives_back: bool) -> Model:
    """A writer that has lost its group and comes to the other one, which its reader fills."""
    model = Model([limits(96, 2)] * 2, slots=2, gives_back=gives_back)
    model.submit(Shape(series(2), (1, 1), (40, 40), (40, 40)))
    for _ in range(4):
        model.step()
    (chain,) = model.running.values()
    assert [agent.open for agent in chain.agents] == [True, True]
    writer, reader = chain.agents
    model.lose(writer.group, back=False, move=True)
    model.restore(1 - reader.group)
    assert writer.group == reader.group
    return model


def test_the_smallest_lock_is_one_chain_that_waits_for_itself() -> None:
    with pytest.raises(Deadlock):
        interrupted_pair(gives_back=False).step()


def test_its_reader_gives_way_and_both_finish() -> None:
    model = interrupted_pair(gives_back=True)
    kept = next(iter(model.running.values())).agents[0].written
    assert kept > 0
    while model.running:
        model.step()
        model.check()
        assert model.now < 300
    assert model.tokens == 80  # what the writer had written was not written again


THROUGHPUTS: list[tuple[str, int, int, int]] = [
    # what is short; slots, tokens of KV cache and sequences of a group
    ("memory", 400, 608, 64),
    ("sequences", 400, 100_000, 6),
    ("logs", 40, 100_000, 64),
    ("all", 60, 608, 6),
]


def closed_loop(
    make: Callable[[random.Random], Shape], chains: int, engines: list[EngineLimits], slots: int, *, steps: int = 1500
) -> tuple[float, list[ModelChain]]:
    """Keep so many chains in the daemon; returns tokens a step, the first 300 steps apart, and who has ended."""
    rng = random.Random(1)
    model = Model(engines, slots)
    early = 0
    while model.now < steps:
        while len(model.running) + len(model.waiting) < chains:
            model.submit(make(rng))
        model.step()
        if model.now == 300:
            early = model.tokens
    return (model.tokens - early) / (steps - 300), model.ended


@pytest.mark.parametrize(("short", "slots", "kv_tokens", "seqs"), THROUGHPUTS, ids=[row[0] for row in THROUGHPUTS])
@pytest.mark.parametrize("make", [ping_pong, mixed, giants])
def test_ten_times_more_chains_than_fit_cost_no_throughput(
    make: Callable[[random.Random], Shape], short: str, slots: int, kv_tokens: int, seqs: int
) -> None:
    engines = [limits(kv_tokens, seqs)] * 2
    fit = 16
    once, _ = closed_loop(make, fit, engines, slots)
    ten, ended = closed_loop(make, 10 * fit, engines, slots)
    assert ten >= 0.9 * once, f"{short}: {once:.2f} tokens a step at 1 x, {ten:.2f} at 10 x"
    waits = [chain.ended - chain.submitted for chain in ended if chain.ended is not None]
    assert max(waits) <= 4 * statistics.median(waits), f"{short}: a chain took {max(waits)} steps"


@pytest.mark.parametrize("grid", [True, False])
def test_neither_those_on_the_grid_nor_the_others_starve(grid: bool) -> None:
    """A chain that waits for a group to itself holds up those behind it, and waits behind those before it."""
    rng = random.Random(3)
    model = Model([limits(608, 6)] * 2, slots=400)
    crowd = 30
    while model.now < 100:
        while len(model.running) + len(model.waiting) < crowd:
            model.submit(replace(mixed(rng), grid=not grid))
        model.step()
    one = model.submit(replace(ping_pong(rng), grid=grid))
    latest = int(one)
    while not any(str(chain.number) == one for chain in model.ended):
        while len(model.running) + len(model.waiting) < crowd + 1:
            latest = int(model.submit(replace(mixed(rng), grid=not grid)))
        model.step()
        assert latest - int(one) < 4 * crowd, "it is overtaken without end"


def test_a_chain_is_overtaken_only_by_younger_ones_within_its_steps_of_priority() -> None:
    aging = 10
    rng = random.Random(2)
    model = Model([limits(608, 6)] * 2, slots=20, aging_s=aging)
    priorities: dict[int, int] = {}
    while model.now < 600 or model.running or model.waiting:
        while model.now < 600 and len(model.waiting) < 40:
            priority = -3 if rng.random() < 0.1 else rng.randint(0, 3)
            priorities[int(model.submit(mixed(rng), priority=priority))] = priority
        model.step()
    started = sorted((chain.started or 0, at, chain) for at, chain in enumerate(model.ended))
    for at, (first, _, winner) in enumerate(started):
        for second, _, loser in started[at:]:
            if first < second:
                steps = priorities[winner.number] - priorities[loser.number] + 1
                assert winner.submitted - loser.submitted <= max(0, steps * aging)
    low = [chain.started - chain.submitted for chain in model.ended if chain.started and priorities[chain.number] == -3]
    assert len(low) > 10


def test_a_chain_past_its_deadline_never_starts() -> None:
    model = Model([limits(608, 1)], slots=5)
    model.submit(sized(random.Random(0), series(5), 24), priority=1)
    late = model.submit(Shape(((),), (1,), (1,), (1,)), deadline=3)
    while model.running or model.waiting:
        model.step()
    assert [chain.started for chain in model.ended if chain.number == int(late)] == [None]
