"""The simulated engine's scheduler: continuous batching, chunked prefill, a prefix cache, and a model of fixed rules.

Pure: the caller plans a step, lets its duration pass, and commits it. What it shares with vLLM: decodes are scheduled
before prefills; a step holds at most `max_num_batched_tokens`; full blocks of computed tokens enter the prefix cache
under a hash of everything before them and the salt; at least one prompt token is always computed. What it shares with
our schedulers for vLLM: appends come last, and get beside decodes what `decode_first.py` grants them; a prompt with a
grid is computed cell by cell, found in the cache up to a cell's end, and entered there in whole cells. Simpler than
vLLM's: a request reserves its full length when it is admitted, so that nothing is ever pre-empted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from pingpong_bus.messages import DecodePace, KeptPrefix, Sampling, SchedulerState
from pingpong_worker.config import SimulatedSettings
from pingpong_worker.decode_first import DecodeFirst, Grant, StepView
from pingpong_worker.simulated_cache import PrefixCache
from pingpong_worker.simulated_messages import Chunk, Computed, Reply, Sampled
from pingpong_worker.simulated_request import EOS, Request
from pingpong_worker.simulated_timing import TimingModel


class Step(msgspec.Struct, frozen=True):
    """A planned step."""

    duration_s: float
    rows: list[tuple[Request, int]]
    """Requests, and how many of their tokens the step computes."""
    state: SchedulerState | None = None
    """What the scheduler has to show, where something decodes and appends are held to a budget."""


class SimulatedScheduler:
    """Holds all requests; see the module's text for its rules.

    Args:
        settings: of the engine.
        decode_first: whether appends are held back; else they are requests like others.
        keep: the part of the prefix cache that beginnings may hold which are expected to come again.
    """

    def __init__(self, settings: SimulatedSettings, *, decode_first: bool = True, keep: float = 0.0) -> None:
        self._settings = settings
        self._timing = TimingModel(settings)
        self._policy = DecodeFirst(self._timing, (), settings.max_num_batched_tokens) if decode_first else None
        self._cache = PrefixCache(settings.kv_tokens // settings.block_size, keep)
        self._seconds = 0.0
        """That its steps took: its clock."""
        self._free_blocks = settings.kv_tokens // settings.block_size
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._steps = self._append_tokens = self._withheld_steps = self._starved_steps = 0

    def add(self, chunk: Chunk) -> None:
        """Give a request its next prompt tokens."""
        request = self._requests.get(chunk.request)
        if request is None:
            request = self._requests[chunk.request] = Request(chunk.request, chunk.salt, chunk.grid, chunk.keep)
            self._waiting.append(request)
        request.extend(chunk.ids)
        request.prompt_tokens += len(chunk.ids)
        request.sampling = chunk.sampling
        request.pace = chunk.pace
        request.is_append = chunk.append or chunk.sampling is None
        if request.admitted:
            self._reserve(request)

    def abort(self, request_id: str) -> None:
        """Forget a request; its computed blocks stay in the prefix cache."""
        if request := self._requests.get(request_id):
            self._end(request)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block."""
        self._cache.clear()

    @property
    def kv_usage(self) -> float:
        """The part of the KV cache that requests hold, 0 to 1."""
        return 1 - self._free_blocks / max(1, self._settings.kv_tokens // self._settings.block_size)

    @property
    def kv_kept(self) -> float:
        """The part of the prefix cache that is kept for beginnings of prompts, 0 to 1."""
        return len(self._cache.retention) / max(1, self._settings.kv_tokens // self._settings.block_size)

    def plan(self) -> Step | None:
        """The next step; None while there is nothing to compute."""
        rows: list[tuple[Request, int]] = []
        room = self._take(
            rows, [one for one in self._running if one.outputs > 0], self._settings.max_num_batched_tokens
        )
        decodes = rows[:]
        prompts = [one for one in self._running if one.outputs == 0 and not self._is_held_back(one)]
        room = self._admit_into(rows, self._take(rows, prompts, room), held_back=False)
        if self._policy is None:
            return Step(self._duration(rows), rows) if rows else None
        view = self._view(decodes, finalizes_wait=len(rows) > len(decodes) or any(one.left for one in prompts))
        grant = self._policy.grant(view)
        before = len(rows)
        # One that starves goes on by a cell, if it has cells, however little it is granted.
        least = room if grant.reason == "starved" and any(one.grid for one in self._appends()) else 0
        budget = min(room, max(grant.tokens, least))
        appends = [one for one in self._running if self._is_held_back(one)]
        self._admit_into(rows, self._take(rows, appends, budget), held_back=True)
        if not rows:
            return None
        appended = sum(tokens for _, tokens in rows[before:])
        self._starved_steps = 0 if appended or not view.append_tokens else self._starved_steps + 1
        duration_s = self._duration(rows)
        return Step(duration_s, rows, self._state(view, grant, duration_s, appended) if decodes else None)

    def commit(self, step: Step) -> list[Reply]:
        """Carry out a planned step once its duration has passed.

        Of a request aborted since, what the step has computed stays in the prefix cache, as in vLLM.
        """
        replies: list[Reply] = []
        self._seconds += step.duration_s
        for request, tokens in step.rows:
            self._compute(request, tokens)
            if request.ended or request.left:
                continue
            if request.sampling is None:
                replies.append(Computed(request.id))
            else:
                replies.append(self._sample(request, request.sampling))
        return replies

    def _is_held_back(self, request: Request) -> bool:
        return self._policy is not None and request.is_append

    def _appends(self) -> list[Request]:
        """Appends with tokens to compute: those that run, then those that wait."""
        return [one for one in (*self._running, *self._waiting) if self._is_held_back(one) and one.left]

    def _take(self, rows: list[tuple[Request, int]], requests: Sequence[Request], room: int) -> int:
        """Add to a step what fits of some requests; gives the room that is left."""
        for request in requests:
            if tokens := request.chunk(room):
                rows.append((request, tokens))
                room -= tokens
        return room

    def _admit_into(self, rows: list[tuple[Request, int]], room: int, *, held_back: bool) -> int:
        """The same for requests that wait, as long as they can be admitted."""
        while room > 0:
            first = next((one for one in self._waiting if self._is_held_back(one) == held_back), None)
            if first is None or not self._admit(first):
                break
            self._waiting.remove(first)
            room = self._take(rows, [first], room)
        return room

    def _view(self, decodes: Sequence[tuple[Request, int]], *, finalizes_wait: bool) -> StepView:
        appends = self._appends()
        paces = [request.pace for request, _ in decodes] or [DecodePace()]
        return StepView(
            decodes=len(decodes),
            decode_work=self._work(decodes),
            target_ratio=min(pace.itl_ratio for pace in paces),
            target_ms=min((pace.itl_target_ms for pace in paces if pace.itl_target_ms is not None), default=None),
            append_tokens=sum(one.left for one in appends),
            append_context=appends[0].computed if appends else 0,
            finalizes_wait=finalizes_wait,
            starved_steps=self._starved_steps,
            steps_left=min((one.outputs_left for one, _ in decodes), default=None),
        )

    def _state(self, view: StepView, grant: Grant, duration_s: float, appended: int) -> SchedulerState:
        assert self._policy is not None  # noqa: S101  asked before
        self._steps += 1
        self._append_tokens += appended
        self._withheld_steps += view.append_tokens > 0 and appended == 0
        return SchedulerState(
            steps=self._steps,
            step_ms=duration_s * 1e3,
            decode_ms=self._policy.decode_seconds(view) * 1e3,
            target_ms=self._policy.target_seconds(view) * 1e3,
            budget_tokens=grant.tokens,
            reason=grant.reason,
            append_tokens=self._append_tokens,
            withheld_steps=self._withheld_steps,
        )

    def _admit(self, request: Request) -> bool:
        """Give the request a seat and look its prefix up; False while there is no room."""
        if len(self._running) >= self._settings.max_num_seqs or not self._reserve(request):
            return False
        size = self._settings.block_size
        block = 0
        # One token is left to compute, whatever the cache holds: there would be nothing to sample from.
        while (block + 1) * size < len(request.ids) and self._cache.touch(request.block_hash(block, size)):
            block += 1
        hit = block * size
        request.computed = request.cached_tokens = hit - hit % request.grid if request.grid else hit
        request.admitted = True
        self._running.append(request)
        return True

    def _reserve(self, request: Request) -> bool:
        """Hold blocks for the request's full length. A growing request takes its growth even where none is free:
        refusing it could leave two of them waiting for each other."""
        length = len(request.ids) + (request.sampling.max_tokens if request.sampling else 0)
        missing = -(-length // self._settings.block_size) - request.reserved_blocks
        if not request.admitted and missing > self._free_blocks:
            return False
        request.reserved_blocks += missing
        self._free_blocks -= missing
        self._cache.use(self._settings.kv_tokens // self._settings.block_size - self._free_blocks)
        return True

    def _duration(self, rows: list[tuple[Request, int]]) -> float:
        return self._timing.price(sum(tokens for _, tokens in rows), self._work(rows), "beside")

    def _work(self, rows: Sequence[tuple[Request, int]]) -> float:
        return sum(self._timing.work(request.computed, tokens, decode=request.outputs > 0) for request, tokens in rows)

    def _compute(self, request: Request, tokens: int) -> None:
        size = self._settings.block_size
        first = request.cacheable // size
        request.computed += tokens
        for block in range(first, request.cacheable // size):
            self._cache.add(request.block_hash(block, size))
        if request.keep is not None:
            self._keep(request, request.keep)

    def _keep(self, request: Request, keep: KeptPrefix) -> None:
        """Let a beginning stay in the cache that is expected to come again, once it is computed."""
        size, tokens = self._settings.block_size, keep.tokens - keep.tokens % self._settings.block_size
        if not 0 < tokens <= request.computed:
            return
        blocks = [request.block_hash(block, size) for block in range(tokens // size)]
        cost = self._timing.price(tokens, self._timing.work(0, tokens, decode=False), "prompts")
        self._cache.keep(blocks, keep.reuse, cost, self._seconds)

    def _sample(self, request: Request, sampling: Sampling) -> Sampled:
        token = request.sample(sampling)
        stopped = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        reason = None
        if stopped:
            reason = "stop"
        else:
            request.extend([token])
            if request.outputs >= sampling.max_tokens:
                reason = "length"
        if reason is not None:
            self._end(request)
        return Sampled(
            request.id, None if stopped else token, reason, token if stopped else None, request.cached_tokens
        )

    def _end(self, request: Request) -> None:
        request.ended = True
        del self._requests[request.id]
        if request.admitted:
            self._running.remove(request)
            self._free_blocks += request.reserved_blocks
            self._cache.use(self._settings.kv_tokens // self._settings.block_size - self._free_blocks)
        else:
            self._waiting.remove(request)
