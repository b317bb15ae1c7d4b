"""Random schedules for the decode-first scheduler: real vLLM schedulers, a runner that checks, and no model.

A schedule is a seed. It gives an engine's sizes (seats, token budget, KV blocks, graphs; planning ahead or not) and a
crowd: plain requests, sessions that append and then decode, with a grid or without, and streaming-input sessions.
They arrive, stop, and are aborted at random; where memory is scarce requests are pre-empted. Time is a model's.

`run_schedule` raises `Violation` for what must never be:

- a token other than the reference's; a block that holds something else; a prompt that is not cut on its grid;
- a request, or a KV block, that is left when all is over;
- no step for long, though requests wait;
- an append that is computed while another prompt waits, unless it has starved, or memory or seats are what that waits
  for; more append tokens beside decodes than were granted;
- a request that is pre-empted, or a decode that misses a step, because of an append;
- an append that gets nothing for longer than the scheduler says, where memory and seats are plenty.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import tiny_model
from kv_checking_runner import STOP_IDS, KvCheckingRunner, WrongContent, reference
from pingpong_worker.decode_first import PATIENCE
from pingpong_worker.step_ledger import StepLedger
from pingpong_worker.vllm_scheduler import PASSED_OVER, AsyncDecodeFirstScheduler, DecodeFirstScheduler

BLOCK = 16
LONGEST = 640
"""Tokens of the longest request, with its output."""
MOST_STEPS = 6000
_IDLE_STEPS = 8
"""Steps in a row without a token, where something could be computed."""
_COMPUTABLE = frozenset({"RUNNING", "WAITING", "PREEMPTED"})


class Violation(AssertionError):
    """What must never be, with the seed and the step."""


@dataclass(frozen=True)
class Setup:
    """An engine's sizes."""

    asynchronous: bool
    seats: int
    budget: int
    blocks: int
    graphs: tuple[int, ...]
    streaming: bool
    """Streaming-input sessions take part: their blocks are reserved then, as nothing can be taken from them."""

    @property
    def grids(self) -> tuple[int, ...]:
        """Cells that fit in a step beside decodes."""
        return tuple(cell for cell in (2 * BLOCK, 4 * BLOCK) if cell + 16 <= self.budget)

    @property
    def plenty(self) -> bool:
        """Whether nothing waits for seats or memory."""
        return self.seats >= 16 and self.blocks >= 2000

    @property
    def crowded(self) -> bool:
        """Whether many requests are to outgrow the memory."""
        return self.seats > 3 and not self.plenty


def setup_of(seed: int) -> Setup:
    """The sizes of a schedule's engine."""
    rng = random.Random(seed)
    streaming = rng.random() < 0.4
    plenty = streaming or rng.random() < 0.4
    return Setup(
        asynchronous=seed % 2 == 1,
        seats=16 if plenty else rng.choice((2, 3, 8)),
        budget=rng.choice((64, 96, 256)),
        blocks=4000 if plenty else LONGEST // BLOCK + rng.choice((2, 4, 60)),
        graphs=rng.choice(((), (1, 2, 4, 8, 16, 32, 64))),
        streaming=streaming,
    )


@functools.cache
def _base_config() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tiny_model.CONFIG))
        arguments = EngineArgs(
            model=folder,
            max_model_len=LONGEST + BLOCK,
            enforce_eager=True,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            skip_tokenizer_init=True,
        )
        init_none_hash(sha256)
        return arguments.create_engine_config()


_hasher = get_request_block_hasher(BLOCK, sha256)


def make_scheduler(setup: Setup, clock: Callable[[], float]) -> Any:
    """A scheduler of the installed vLLM's, with our class on it."""
    config = copy.copy(_base_config())
    config.scheduler_config, config.cache_config = copy.copy(config.scheduler_config), copy.copy(config.cache_config)
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.scheduler_config.max_num_seqs = setup.seats
    config.scheduler_config.max_num_batched_tokens = setup.budget
    config.scheduler_config.max_num_scheduled_tokens = setup.budget
    config.cache_config.num_gpu_blocks = setup.blocks
    config.cache_config.block_size = BLOCK
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=setup.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    kind = AsyncDecodeFirstScheduler if setup.asynchronous else DecodeFirstScheduler
    scheduler: Any = kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )
    scheduler._clock = clock
    scheduler._ledger = StepLedger(setup.graphs, setup.budget, None)
    return scheduler


def make_request(
    name: str,
    ids: Sequence[int],
    max_tokens: int,
    *,
    mark: dict[str, Any] | None = None,
    stops: bool = False,
    salt: str | None = None,
    resumable: bool = False,
    now: float = 0.0,
) -> Request:
    """A vLLM request as an engine would hand it to its scheduler."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        stop_token_ids=sorted(STOP_IDS) if stops else None,
        ignore_eos=True,
        detokenize=False,
        extra_args={"pingpong": mark} if mark is not None else None,
    )
    if hasattr(params, "update_from_generation_config"):
        params.update_from_generation_config({}, 2)
    return Request(
        request_id=name,
        prompt_token_ids=list(ids),
        sampling_params=params,
        pooling_params=None,
        arrival_time=now,
        block_hasher=_hasher,
        cache_salt=salt,
        resumable=resumable,
    )


class World:
    """One engine core: the scheduler, the runner, the steps under way, and the clock."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup = setup
        self.rng = rng
        self.now = 0.0
        self.scheduler = make_scheduler(setup, lambda: self.now)
        self.runner = KvCheckingRunner(BLOCK)
        self.steps = 0
        self.appends: dict[str, int] = {}
        """Appends that are not computed: the step in which they last got a token, or came."""
        self.requests = self.preempted = 0
        self._under_way: deque[tuple[Any, ModelRunnerOutput, float]] = deque()
        self._busy_until = 0.0
        self._waited: set[str] = set()
        self._idle = self._unserved = 0

    def submit(self, request: Request, *, append: bool = False, grid: int = 0) -> None:
        """Hand a request, or a session's next chunk, to the scheduler."""
        self.requests += 1
        if append:
            self.appends[request.request_id] = self.steps
        if grid:
            self.runner.grids[request.request_id] = grid
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """End a request from outside."""
        self.appends.pop(name, None)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def at_rest(self) -> bool:
        """Whether nothing is left to do."""
        return not self._under_way and not self.scheduler.has_requests()

    def step(self) -> list[Any]:
        """What an engine core does in one turn; gives the outputs, if any came."""
        self.steps += 1
        if self.scheduler.has_requests():
            output = self._schedule()
            ran = output.total_num_scheduled_tokens > 0
            ids, sampled = self.runner.run(output)
            result = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: index for index, name in enumerate(ids)},
                sampled_token_ids=sampled,
            )
            self._busy_until = max(self._busy_until, self.now) + self._duration(output)
            self._under_way.append((output, result, self._busy_until))
            if self.setup.asynchronous and len(self._under_way) < 2 and ran:
                return []
        if not self._under_way:
            return []
        output, result, ended = self._under_way.popleft()
        self.now = max(self.now, ended)
        outputs = self.scheduler.update_from_output(output, result)
        return list(outputs[0].outputs) if 0 in outputs else []

    def _duration(self, output: Any) -> float:
        if not output.total_num_scheduled_tokens:
            return 0.0
        work = sum(
            tokens * self.scheduler.requests[name].num_computed_tokens
            for name, tokens in output.num_scheduled_tokens.items()
        )
        return (8e-3 + 2e-4 * output.total_num_scheduled_tokens + 1e-7 * work) * self.rng.uniform(0.97, 1.05)

    def _schedule(self) -> Any:
        requests = self.scheduler.requests
        prompts = {name for name, one in requests.items() if self._is_prompt(one)}
        waiting = {name for name in prompts if requests[name].status != RequestStatus.RUNNING}
        decodes = {name for name, one in requests.items() if self._decodes(one)}
        appends = {name for name in self.appends if name in requests and self._has_tokens_left(requests[name])}
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        self._check_preempted(set(output.preempted_req_ids or ()))
        self._check_appends({name: scheduled[name] for name in appends if name in scheduled}, prompts, waiting)
        if self.setup.plenty:
            if missing := decodes - set(scheduled):
                raise Violation(f"{missing} decode, and are not in the step")
            self._check_admitted(waiting - set(scheduled), self.setup.budget - output.total_num_scheduled_tokens)
            full = output.total_num_scheduled_tokens == self.setup.budget  # then one that waits has to go on waiting
            queued = {name for name in appends if requests[name].status != RequestStatus.RUNNING}
            self._check_starved(appends - queued if full else appends, set(scheduled))
        self._waited = waiting - set(scheduled)
        self._check_progress(output)
        return output

    def _check_preempted(self, names: set[str]) -> None:
        """That nothing is pre-empted before the appends are."""
        self.preempted += len(names)
        requests = self.scheduler.requests
        left = [name for name in self.appends if name in requests and requests[name].status == RequestStatus.RUNNING]
        if left and names - set(self.appends):
            raise Violation(f"{names} were pre-empted, and appends {left} were not")

    def _check_appends(self, appended: dict[str, int], prompts: set[str], waiting: set[str]) -> None:
        """That appends get what was granted, and nothing beside a prompt that could be computed."""
        if not appended:
            return
        grant = self.scheduler._ledger._planned[-1].grant
        behind = prompts - (waiting & self._waited)
        if behind and grant.reason != "starved":
            raise Violation(f"appends {appended} are computed while {behind} wait")
        if sum(appended.values()) > grant.tokens and not self._has_one_alone(appended):
            raise Violation(f"appends {appended} were granted {grant}")
        for name in appended:
            self.appends[name] = self.steps

    def _check_admitted(self, waiting: set[str], room: int) -> None:
        """That no prompt waits while the step has room; one whose cell does not fit holds back those behind it."""
        if waiting and room > max(self.runner.grids.get(name, 0) for name in waiting):
            raise Violation(f"{waiting} wait for their prompts, and the step has room for {room} tokens")

    def _check_starved(self, appends: set[str], scheduled: set[str]) -> None:
        """That some append is served now and then, and each after a while."""
        self._unserved = self._unserved + 1 if appends and not appends & scheduled else 0
        if self._unserved > PATIENCE + 1:
            raise Violation(f"none of the appends {appends} got anything in {self._unserved} steps")
        limit = (PATIENCE + 2) * (len(self.appends) + 1) + PASSED_OVER
        for name in appends:
            if self.steps - self.appends[name] > limit:
                raise Violation(f"append {name} got nothing for {limit} steps")

    def _has_one_alone(self, appended: dict[str, int]) -> bool:
        """Whether the step is that of an append that has waited too long, which may take a whole cell."""
        return len(appended) == 1 and max(appended.values()) <= self.runner.grids.get(next(iter(appended)), 0)

    def _is_prompt(self, request: Any) -> bool:
        """Whether a request that is no append could compute known tokens now."""
        if request.request_id in self.appends or request.status.name not in _COMPUTABLE:
            return False
        return bool(request.num_computed_tokens < max(request.num_prompt_tokens, request.num_tokens - 1))

    def _decodes(self, request: Any) -> bool:
        """Whether a running request has a next token to compute, which is not under way yet."""
        if request.request_id in self.appends or request.status != RequestStatus.RUNNING or self._is_prompt(request):
            return False
        planned = request.num_computed_tokens + 1 - request.num_prompt_tokens
        return bool(planned < request.max_tokens and request.num_computed_tokens < request.num_tokens_with_spec + 1)

    def _has_tokens_left(self, request: Any) -> bool:
        return request.status.name in _COMPUTABLE and bool(request.num_computed_tokens < request.num_tokens)

    def _check_progress(self, output: Any) -> None:
        """That something is computed, unless all waits for input, or is under way."""
        computable = any(map(self._has_tokens_left, self.scheduler.requests.values()))
        self._idle = 0 if output.total_num_scheduled_tokens or not computable else self._idle + 1
        if self._idle > _IDLE_STEPS:
            raise Violation(f"nothing was computed for {self._idle} steps")

    def check_empty(self) -> None:
        """Raise Violation if anything is left."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        used = self.setup.blocks - 1 - pool.get_num_free_blocks()
        held = [block.block_id for block in pool.blocks if block.ref_cnt > 0 and not block.is_null]
        if used or held:
            raise Violation(f"{used} blocks are not free, {len(held)} are held")
        waiting = sum(scheduler.get_request_counts())
        if scheduler.requests or waiting:
            raise Violation(f"{len(scheduler.requests)} requests are left, {waiting} of them in a queue")
        if scheduler._ledger._planned:
            raise Violation("a step has no end")


def run_schedule(seed: int) -> World:
    """Run one schedule to its end.

    Raises:
        Violation: see the module's text; or what vLLM raised, as its cause.
    """
    from schedule_crowd import make_crowd  # which makes requests, and needs this module

    rng = random.Random(seed)
    world = World(setup_of(seed), rng)
    crowd = make_crowd(world)
    try:
        while not (world.at_rest and all(one.done for one in crowd)):
            for one in crowd:
                one.act()
            for output in world.step():
                for one in crowd:
                    one.receive(output)
            if world.steps > MOST_STEPS:
                raise Violation(f"no end after {MOST_STEPS} steps: {[one for one in crowd if not one.done]}")
        world.scheduler.schedule()  # tells the runner of the last ends
        world.check_empty()
    except (Violation, WrongContent) as error:
        raise Violation(f"seed {seed}, step {world.steps}, {world.setup}: {error}") from error
    except (AssertionError, KeyError, IndexError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise Violation(f"seed {seed}, step {world.steps}, {world.setup}: {type(error).__name__} {error}") from error
    return world


__all__ = ["LONGEST", "Setup", "Violation", "World", "make_request", "reference", "run_schedule", "setup_of"]
