"""Marked beginnings of prompts stay in the installed vLLM's prefix cache, and never in the way of what runs."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pingpong_bus.errors import ConfigError

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # what torch and vLLM say is not ours to mend

BLOCKS = 120
KNOWN = 256
"""Tokens of the beginning that comes back: 16 blocks."""


class Desk:
    """Submits requests to a scheduler, one after the other, and lets them end."""

    def __init__(self, keep: float, *, asynchronous: bool = False) -> None:
        from schedule_engine import Setup
        from schedule_world import World

        setup = Setup(asynchronous, seats=8, budget=256, blocks=BLOCKS, graphs=(), streaming=False, keep=keep)
        self.world = World(setup, random.Random(1))
        self._rng = random.Random(2)
        self._names = iter(range(10_000))
        self.known = [self._rng.randrange(24, 500) for _ in range(KNOWN)]

    @property
    def manager(self) -> Any:
        return self.world.scheduler.kv_cache_manager

    @property
    def kept(self) -> Any:
        return self.world.scheduler._kept

    def other(self, tokens: int) -> list[int]:
        return [self._rng.randrange(24, 500) for _ in range(tokens)]

    def submit(self, ids: list[int], *, output: int = 4, reuse: float | None = None, **more: Any) -> str:
        from schedule_engine import make_request

        name = f"r{next(self._names)}"
        mark = {**more.pop("mark", {}), **({"keep": [KNOWN, reuse]} if reuse is not None else {})}
        self.world.submit(make_request(name, ids, output, mark=mark or None, now=self.world.now, **more))
        return name

    def run(self, ids: list[int], **more: Any) -> None:
        self.submit(ids, **more)
        while not self.world.at_rest:
            self.world.step()

    def flood(self, chains: int) -> None:
        for _ in range(chains):
            self.run(self.other(200))

    def hit(self, ids: list[int], salt: str | None = None) -> int:
        """Tokens of a prompt that are in the cache."""
        from schedule_engine import make_request

        found = self.manager.get_computed_blocks(make_request("looks", [*ids, 24], 1, salt=salt))
        return int(found[1])


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def desk(request: Any) -> Desk:
    return Desk(0.5, asynchronous=request.param)


def test_without_marks_fifty_others_push_it_out(desk: Desk) -> None:
    desk.run(desk.known + desk.other(40))
    desk.flood(50)
    assert desk.hit(desk.known) == 0


def test_a_marked_beginning_outlasts_fifty_others(desk: Desk) -> None:
    desk.run(desk.known + desk.other(40), reuse=2.0)
    desk.flood(50)
    assert desk.hit(desk.known) == KNOWN
    assert desk.kept is not None
    desk.run(desk.known + desk.other(40), reuse=2.0)  # found, used and put aside anew
    desk.flood(50)
    assert desk.hit(desk.known) == KNOWN


def test_nothing_is_kept_where_none_may_be() -> None:
    desk = Desk(0.0)
    assert desk.kept is None
    desk.run(desk.known, reuse=2.0)
    desk.flood(50)
    assert desk.hit(desk.known) == 0


def test_kept_blocks_count_as_free_and_are_given_up_last(desk: Desk) -> None:
    desk.run(desk.known + desk.other(40), reuse=2.0)
    desk.flood(20)
    assert desk.kept.share == pytest.approx(KNOWN / 16 / BLOCKS)
    assert len(desk.kept) == KNOWN // 16
    assert desk.manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    # Two requests that together want everything: neither waits, nothing is pre-empted.
    first, second = (desk.submit(desk.other(600), output=8) for _ in range(2))
    running: set[str] = set()
    while not desk.world.at_rest:
        desk.world.step()
        running |= {one.request_id for one in desk.world.scheduler.running if one.num_computed_tokens > 300}
    assert running == {first, second}
    assert desk.world.preempted == 0
    assert desk.hit(desk.known) == KNOWN, "they took 76 of 119"
    for _ in range(3):
        desk.submit(desk.other(600), output=8)
    while not desk.world.at_rest:
        desk.world.step()
    assert desk.world.preempted == 0
    assert 0 < desk.hit(desk.known) < KNOWN, "three of 38 blocks take 11 of the 16, from the end"


def test_a_longer_beginning_than_may_be_kept_keeps_what_may() -> None:
    desk = Desk(0.1)
    desk.run(desk.known + desk.other(40), reuse=2.0)
    desk.flood(50)
    assert desk.hit(desk.known) == 12 * 16


def test_what_is_expected_more_often_takes_the_room() -> None:
    desk = Desk(0.2)  # 24 blocks
    often, rare = desk.other(KNOWN), desk.other(KNOWN)
    desk.run(rare, reuse=1.0)
    desk.run(often, reuse=3.0)
    desk.flood(50)
    assert (desk.hit(often), desk.hit(rare)) == (KNOWN, 8 * 16)
    for _ in range(2):  # expected no more
        desk.run(often, reuse=0.0)
    desk.run(rare, reuse=1.5)
    desk.flood(50)
    assert (desk.hit(often), desk.hit(rare)) == (0, KNOWN)


def test_salts_and_grids_are_kept_apart(desk: Desk) -> None:
    desk.run(desk.known + desk.other(10), reuse=2.0, mark={"grid": 64}, salt="grid64")
    desk.flood(50)
    assert desk.hit(desk.known) == 0
    assert desk.hit(desk.known, "grid64") == KNOWN


def test_a_reset_forgets_what_was_kept(desk: Desk) -> None:
    desk.run(desk.known + desk.other(40), reuse=2.0)
    desk.flood(20)
    assert desk.world.scheduler.reset_prefix_cache()
    assert (len(desk.kept), len(desk.kept.policy), desk.hit(desk.known)) == (0, 0, 0)
    desk.world.check_free()
    desk.flood(20)


def test_an_append_marks_as_an_answer_does(desk: Desk) -> None:
    desk.run(desk.known, output=1, reuse=2.0, mark={"append": True})
    desk.flood(50)
    assert desk.hit(desk.known) == KNOWN


def test_one_cut_off_before_its_beginning_is_computed_marks_nothing(desk: Desk) -> None:
    name = desk.submit(desk.known + desk.other(300), reuse=2.0)
    desk.world.scheduler.kv_cache_manager  # noqa: B018
    desk.world.abort(name)
    while not desk.world.at_rest:
        desk.world.step()
    assert len(desk.kept.policy) == 0


# ----------------------------------------------------------------------------------------------------------- the pool


def test_any_order_of_use_leaves_every_block_in_its_place() -> None:
    """Blocks are found, taken, freed, forgotten and marked in random orders; `kept` ones only go for want of others."""
    from vllm.v1.core.block_pool import BlockPool

    from pingpong_worker.prefix_retention import PrefixRetention
    from pingpong_worker.vllm_retention import KeptBlocks

    saved = 0
    for seed in range(60):
        rng = random.Random(seed)
        pool = BlockPool(num_gpu_blocks=rng.randrange(12, 40), enable_caching=True, hash_block_size=16)
        kept = KeptBlocks(pool, PrefixRetention(rng.randrange(1, 20)))
        texts = [[b"%d/%d" % (text, at) for at in range(8)] for text in range(6)]
        open_: list[list[Any]] = []
        for step in range(300):
            match rng.randrange(10):
                case 0 | 1 | 2 | 3:
                    hashes = rng.choice(texts)[: rng.randrange(1, 9)]
                    saved += _take(pool, kept, hashes, open_)
                case 4 | 5 | 6 if open_:
                    pool.free_blocks(reversed(open_.pop(rng.randrange(len(open_)))))
                case 7:
                    reuse = rng.choice((0.0, 1.0, 5.0))
                    kept.note(rng.choice(texts), rng.randrange(1, 9), reuse, lambda: 1.0, step * 20)
                case 8:
                    pool.evict_blocks({rng.randrange(1, pool.num_gpu_blocks)})
                case 9 if rng.random() < 0.1:
                    pool.reset_prefix_cache()
            _check(pool, kept)
    assert saved > 500, "or nothing was ever kept that others would have taken"


@pytest.mark.parametrize(
    ("part", "replacement"),
    [
        ("_removed", lambda self, block: self._remove(block)),
        ("_make_room", lambda self, blocks: None),
        ("_is_kept", lambda self, block: block.block_hash in self.policy),
    ],
)
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch, part: str, replacement: Any) -> None:
    from pingpong_worker.vllm_retention import KeptBlocks

    monkeypatch.setattr(KeptBlocks, part, replacement)
    with pytest.raises((AssertionError, RuntimeError, AttributeError)):
        test_any_order_of_use_leaves_every_block_in_its_place()


def _take(pool: Any, kept: Any, hashes: list[bytes], open_: list[list[Any]]) -> int:
    blocks: list[Any] = []
    for one in hashes:
        found = pool.get_cached_block(one, [0])
        if not found:
            break
        blocks += found
    pool.touch(blocks)
    new = len(hashes) - len(blocks)
    held = [block for block in pool.blocks if block.block_hash and block.ref_cnt == 0 and kept._is_kept(block)]
    before = {block.block_id: block.block_hash for block in held}
    others = pool.get_num_free_blocks() - len(held)
    if new > pool.get_num_free_blocks():
        pool.free_blocks(reversed(blocks))
        return 0
    blocks += pool.get_new_blocks(new)
    lost = [at for at, key in before.items() if pool.blocks[at].block_hash != key]
    assert len(lost) <= max(0, new - others), "a kept one went although there were others"
    request = SimpleNamespace(block_hashes=hashes)
    pool.cache_full_blocks(request, blocks, len(hashes) - new, len(hashes), 16, 0)
    open_.append(blocks)
    return len(held)


def _check(pool: Any, kept: Any) -> None:
    free = {block.block_id for block in _all(pool.free_block_queue)} | {block.block_id for block in _all(kept._aside)}
    assert free == {block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null}
    assert len(free) == pool.get_num_free_blocks()
    assert len(list(_all(kept._aside))) == len(kept)


def _all(queue: Any) -> Iterator[Any]:
    return iter(queue.get_all_free_blocks())


# ---------------------------------------------------------------------------------------------------------- the checks


def test_the_installed_pool_is_known_and_what_has_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from pingpong_worker import vllm_retention_checks as checks

    parts = checks.installed_pool()
    assert list(checks.pool_faults(parts)) == []
    checks.check_retention()

    class OtherPool(parts.pool):  # type: ignore[misc]
        def touch(self, blocks: Any) -> None: ...

    class OtherQueue(parts.queue):  # type: ignore[misc]
        def prepend_n(self, head: Any) -> None: ...

    for changed, sentence in (
        ({"pool": OtherPool}, "`OtherPool.touch` takes a block that is found in another way"),
        ({"queue": OtherQueue}, "`OtherQueue.prepend_n` takes (head)"),
        ({"block": int}, "a block has no `block_hash`"),
        ({"group_hash": lambda one, group: (one, group)}, "hashes of blocks are made in another way"),
    ):
        assert sentence in list(checks.pool_faults(SimpleNamespace(**(vars(parts) | changed))))
    assert "self" in inspect.signature(parts.pool.touch).parameters
    changed_parts = SimpleNamespace(**(vars(parts) | {"pool": OtherPool}))
    monkeypatch.setattr(checks, "installed_pool", lambda: changed_parts)
    with pytest.raises(ConfigError, match=r"does not know the block pool of vLLM .*touch"):
        checks.check_retention()
