"""One engine core in a random schedule, and what is checked in each of its steps: see `random_schedules.py`."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kv_checking_runner import KvCheckingRunner
from pingpong_worker.decode_first import PATIENCE
from pingpong_worker.vllm_scheduler import PASSED_OVER
from schedule_engine import BLOCK, Setup, make_scheduler

_IDLE_STEPS = 8
"""Steps in a row without a token, where something could be computed."""
_COMPUTABLE = frozenset({"RUNNING", "WAITING", "PREEMPTED"})


class Violation(AssertionError):
    """What must never be, with the seed and the step."""


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
        self.requests = self.preempted = self.kept = self.waited = 0
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
        if self.scheduler._guesses.waits:
            self._check_waits(output)
            return output
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
        if self.steps % 16 == 0:  # it looks at every block
            self.check_free()
        return output

    def _check_waits(self, output: Any) -> None:
        """That a step which waits for results is empty, and that there are some to wait for."""
        self.waited += 1
        if output.total_num_scheduled_tokens or not self._under_way or not self.setup.asynchronous:
            raise Violation(f"a step of {output.total_num_scheduled_tokens} tokens waits, {len(self._under_way)} run")

    def _check_preempted(self, names: set[str]) -> None:
        """That nothing is pre-empted before the appends are."""
        self.preempted += len(names)
        requests = self.scheduler.requests
        # Idle sessions that give way are told to the runner as well: they lose nothing that runs.
        names = {name for name in names if name in requests and requests[name].status == RequestStatus.PREEMPTED}
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

    def check_free(self) -> None:
        """That every free block stands in the queue, or aside because it is kept, and is counted."""
        pool, kept = self.scheduler.kv_cache_manager.block_pool, self.scheduler._kept
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        if kept is not None:
            aside = [block.block_id for block in kept._aside.get_all_free_blocks()]
            self.kept = max(self.kept, len(aside))
            free += aside
            if len(aside) != len(kept):
                raise Violation(f"{len(aside)} blocks stand aside, and {len(kept)} are known")
            if len(kept.policy) > self.setup.keep * self.setup.blocks:
                raise Violation(f"{len(kept.policy)} of {self.setup.blocks} blocks are kept")
        unused = sorted(block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null)
        if sorted(free) != unused or len(unused) != pool.get_num_free_blocks():
            count = pool.get_num_free_blocks()
            raise Violation(f"{sorted(free)} are free, {count} by count, and {unused} are not used")

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
        self.check_free()
