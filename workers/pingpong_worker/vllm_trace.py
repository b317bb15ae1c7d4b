"""The way of a request through vLLM's processes to its first token, in the trace that `request_trace.py` describes.

| stage | process | when |
|---|---|---|
| encoding | worker | vLLM has checked the request and begins to send it |
| sent | worker | it is with ZeroMQ |
| decoding | engine, input thread | its message begins to be decoded |
| decoded | engine, input thread | and becomes a request: its blocks are hashed |
| hashed | engine, input thread | it is put into the engine's queue |
| queued | engine | the engine's loop hands it to the scheduler |
| scheduling | engine | the step that computes the last of its prompt begins to be scheduled |
| executing | engine | and is given to the executor |
| preparing | of the device | the model runner begins with it, where it is the request's first step |
| added | of the device | its prompt and blocks are with the model runner |
| prepared | of the device | the step's inputs are |
| launched | of the device | its kernels are launched; on CPUs the model has run |
| sampled | of the device | and those of the sampler |
| planned | of the device | the same for the step after it, where the engine plans ahead |
| computed | engine | the step's output is there |
| updated | engine | the scheduler has taken it |
| received | worker | the first output is back |

Requests have our own ids; vLLM adds a suffix to them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pingpong_worker.request_trace import Trace

STAGES = (
    "encoding",
    "sent",
    "decoding",
    "decoded",
    "hashed",
    "queued",
    "scheduling",
    "executing",
    "preparing",
    "added",
    "prepared",
    "launched",
    "sampled",
    "planned",
    "computed",
    "updated",
    "received",
)
"""In their order, but for "sent": its thread may go on after the engine's."""


RUNNER_STAGES = {
    "add_requests": "added",
    "_update_states": "added",
    "prepare_inputs": "prepared",
    "_prepare_inputs": "prepared",
    "sample_tokens": "sampled",
}
"""What is done when a method of vLLM's model runners returns: of the second one, and of the first."""


class RequestTrace:
    """A trace of requests, each until its first token.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self._trace = Trace(folder)
        self._waiting: set[str] = set()
        """By vLLM's ids."""

    def begin(self, request_id: str) -> None:
        """It has no token yet."""
        self._waiting.add(request_id)

    def end(self, request_id: str) -> None:
        """It has one, or soon will."""
        self._waiting.discard(request_id)

    def waits(self, request_id: str) -> bool:
        """Whether it has begun and not ended."""
        return request_id in self._waiting

    def note(self, request_id: str, stage: str, at_ns: int) -> None:
        """Write a line."""
        self._trace.note(request_id.rpartition("-")[0] or request_id, stage, at_ns)


def trace_worker(folder: Path) -> None:
    """Wrap what runs in the process that has the `AsyncLLM`, for as long as it lives."""
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor

    trace = RequestTrace(folder)
    send, receive = AsyncMPClient.add_request_async, OutputProcessor.process_outputs

    @functools.wraps(send)
    async def add_request_async(self: Any, request: Any) -> None:
        trace.begin(request.request_id)
        trace.note(request.request_id, "encoding", time.monotonic_ns())
        await send(self, request)
        trace.note(request.request_id, "sent", time.monotonic_ns())

    @functools.wraps(receive)
    def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic_ns()
        for output in outputs:
            if trace.waits(output.request_id):
                trace.end(output.request_id)
                trace.note(output.request_id, "received", now)
        return receive(self, outputs, *args, **kwargs)

    AsyncMPClient.add_request_async = add_request_async
    OutputProcessor.process_outputs = process_outputs


def trace_engine(folder: Path) -> None:
    """Wrap what runs in the process of the `EngineCore`, and in those of its workers if it has any.

    It is called as the `EngineCore` begins to be made, so that its objects are wrapped at the first request.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.serial_utils import MsgpackDecoder
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    trace = RequestTrace(folder)
    at = threading.local()
    decode, preprocess, queue = MsgpackDecoder.decode, EngineCore.preprocess_add_request, EngineCore.add_request
    run = WorkerWrapperBase.execute_model
    wrapped = False
    runner: _RunnerTrace | None = None

    @functools.wraps(decode)
    def timed_decode(self: Any, bufs: Any) -> Any:
        at.decoding = time.monotonic_ns()
        return decode(self, bufs)

    @functools.wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        nonlocal wrapped
        if not wrapped:
            wrapped = True
            _trace_steps(trace, self.scheduler, self.model_executor)
        decoded = time.monotonic_ns()
        made = preprocess(self, request)
        hashed = time.monotonic_ns()
        trace.begin(request.request_id)
        for stage, moment in (("decoding", at.decoding), ("decoded", decoded), ("hashed", hashed)):
            trace.note(request.request_id, stage, moment)
        return made

    @functools.wraps(queue)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        trace.note(request.request_id, "queued", time.monotonic_ns())
        queue(self, request, *args, **kwargs)

    @functools.wraps(run)
    def execute_model(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal runner
        preparing = time.monotonic_ns()
        if runner is None:
            runner = _RunnerTrace(trace, self.worker.model_runner)
        runner.begin(output, preparing)
        result = run(self, output, *args, **kwargs)
        runner.note("launched")
        return result

    MsgpackDecoder.decode = timed_decode
    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.add_request = add_request
    WorkerWrapperBase.execute_model = execute_model


class _RunnerTrace:
    """What the model runner of a process does in a request's first step, if its prompt ends there."""

    def __init__(self, trace: RequestTrace, runner: Any) -> None:
        self._trace = trace
        self._names: list[str] = []
        """Of the step that is being launched."""
        self._before: list[str] = []
        """Of the one before."""
        for name, stage in RUNNER_STAGES.items():
            if hasattr(runner, name):
                setattr(runner, name, self._noted(getattr(runner, name), stage))

    def begin(self, output: Any, preparing_ns: int) -> None:
        """A step begins."""
        self._before, self._names = (
            self._names,
            [
                new.req_id
                for new in output.scheduled_new_reqs
                if new.num_computed_tokens + output.num_scheduled_tokens[new.req_id] >= len(new.prompt_token_ids or ())
            ],
        )
        for name in self._names:
            self._trace.note(name, "preparing", preparing_ns)

    def note(self, stage: str) -> None:
        """A part of it is done."""
        now = time.monotonic_ns()
        for name in self._names:
            self._trace.note(name, stage, now)
        if stage == "sampled":
            for name in self._before:
                self._trace.note(name, "planned", now)

    def _noted(self, method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.note(stage)
            return result

        return noted


def _trace_steps(trace: RequestTrace, scheduler: Any, executor: Any) -> None:
    """Wrap the methods of one engine's scheduler and executor."""
    schedule: Callable[..., Any] = scheduler.schedule
    update: Callable[..., Any] = scheduler.update_from_output
    execute: Callable[..., Any] = executor.execute_model
    last: dict[int, list[str]] = {}
    """Requests whose prompt ends in a step, by the step's output."""
    begun = 0

    def timed_schedule(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        begun = time.monotonic_ns()
        output = schedule(*args, **kwargs)
        ends = [name for name in output.num_scheduled_tokens if trace.waits(name) and _prompt_ends(scheduler, name)]
        for name in ends:
            trace.end(name)
        if ends:
            last[id(output)] = ends
        return output

    def timed_execute(output: Any, *args: Any, **kwargs: Any) -> Any:
        executing = time.monotonic_ns()
        for name in last.get(id(output), ()):
            trace.note(name, "scheduling", begun)
            trace.note(name, "executing", executing)
        return execute(output, *args, **kwargs)

    def timed_update(output: Any, *args: Any, **kwargs: Any) -> Any:
        computed = time.monotonic_ns()
        result = update(output, *args, **kwargs)
        updated = time.monotonic_ns()
        for name in last.pop(id(output), ()):
            trace.note(name, "computed", computed)
            trace.note(name, "updated", updated)
        return result

    scheduler.schedule, scheduler.update_from_output, executor.execute_model = (
        timed_schedule,
        timed_update,
        timed_execute,
    )


def _prompt_ends(scheduler: Any, request_id: str) -> bool:
    request = scheduler.requests.get(request_id)
    return request is not None and request.num_computed_tokens >= request.num_prompt_tokens
