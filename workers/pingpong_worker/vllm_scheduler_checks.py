"""What our schedulers rely on in vLLM's, looked up in the installed version before its engine starts.

vLLM's scheduler is no public interface. These checks read signatures and source, and start nothing: an engine whose
scheduler has changed under us is refused with one sentence, where it would fail, or schedule wrongly, in the middle of
a chain.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from pingpong_bus.errors import ConfigError
from pingpong_worker.vllm_step import QUEUES, READY

_HOOK = "_mamba_block_aligned_split"
_FLAG = "need_mamba_block_aligned_split"
_HOOK_PARAMETERS = ("request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens")
_REQUEST_NAMES = (
    "arrival_time",
    "max_tokens",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_output_tokens",
    "num_prompt_tokens",
    "num_tokens",
    "request_id",
    "sampling_params",
    "spec_token_ids",
    "status",
    "streaming_queue",
)
_REPLACED = frozenset({"schedule", "update_from_output", "make_spec_decoding_stats", _HOOK})
"""Methods of vLLM's that ours are meant to replace."""
_LOOPS = 2
"""In `schedule()`: over running requests, and over waiting ones."""


def check_scheduler() -> None:
    """See that the installed vLLM has what our schedulers rely on. It imports much of vLLM.

    Raises:
        ConfigError: it lacks something; the first thing is named.
    """
    from pingpong_worker import vllm_scheduler

    parts = installed_parts()
    if (fault := next(faults(parts, vllm_scheduler), None)) is not None:
        from pingpong_worker.vllm_versions import installed_version

        version = ".".join(map(str, installed_version()))
        raise ConfigError(
            f"decode-first scheduling does not know the scheduler of vLLM {version}: {fault}.",
            field="decode_first",
            hint="Set `[decode_first] enabled = false`, or install a version of vLLM that is known to work.",
        )


def check_guesses_known(*, on_cpu: bool) -> None:
    """See that the installed vLLM checks guessed tokens in the way that `vllm_draft_runner.py` knows.

    Raises:
        ConfigError: it does not; the first thing is named.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from pingpong_worker import vllm_draft_runner

    if (fault := next(vllm_draft_runner.faults(_model_runner(on_cpu=on_cpu), Scheduler), None)) is not None:
        raise ConfigError(
            f"the installed vLLM cannot be given guessed tokens: {fault}.",
            field="speculation",
            hint="Set `[speculation] enabled = false`, or install a version of vLLM that is known to work.",
        )


def _model_runner(*, on_cpu: bool) -> type:
    """The class whose steps are to hold guesses; on GPUs the V2 one, which most models have there."""
    if on_cpu:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        return CPUModelRunner  # type: ignore[no-any-return]
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return GPUModelRunner  # type: ignore[no-any-return]


def installed_parts() -> SimpleNamespace:
    """vLLM's classes that `faults` looks at."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, RequestStatus, StreamingUpdate

    return SimpleNamespace(
        scheduler=Scheduler,
        async_scheduler=AsyncScheduler,
        output=SchedulerOutput,
        queue=RequestQueue,
        request=Request,
        status=RequestStatus,
        update=StreamingUpdate,
        manager=KVCacheManager,
        coordinator=KVCacheCoordinator,
    )


def faults(parts: Any, ours: ModuleType) -> Iterator[str]:
    """What is missing or other than it was, as ends of sentences.

    Args:
        parts: as from `installed_parts`.
        ours: the module `vllm_scheduler`.
    """
    yield from _hook_faults(parts)
    yield from _queue_faults(parts)
    for name in ("update_from_output", "_update_request_as_session"):
        if not callable(getattr(parts.scheduler, name, None)):
            yield f"it has no `{name}`"
    known = _names(parts.request) | set(vars(parts.request))
    for name in _REQUEST_NAMES:
        if name not in known:
            yield f"a request has no `{name}`"
    for name in sorted(READY):
        if name not in parts.status.__members__:
            yield f"there is no status `{name}`"
    for name in ("num_scheduled_tokens", "total_num_scheduled_tokens", "preempted_req_ids", "scheduled_new_reqs"):
        if name not in parts.output.__dataclass_fields__:
            yield f"a step's output has no `{name}`"
    for name in ("max_tokens", "sampling_params"):
        if name not in parts.update.__dataclass_fields__:
            yield f"a session's next chunk has no `{name}`"
    yield from _cache_faults(parts)
    yield from _shared_names(parts, ours)


def _hook_faults(parts: Any) -> Iterator[str]:
    hook = getattr(parts.scheduler, _HOOK, None)
    if hook is None:
        yield f"it has no `{_HOOK}`"
        return
    parameters = list(inspect.signature(hook).parameters)[1:]
    if tuple(parameters[: len(_HOOK_PARAMETERS)]) != _HOOK_PARAMETERS:
        yield f"`{_HOOK}` takes ({', '.join(parameters)})"
    source = inspect.getsource(parts.scheduler.schedule)
    for name in (f"self.{_HOOK}(", f"self.{_FLAG}"):
        if (count := source.count(name)) != _LOOPS:
            yield f"`schedule` has `{name.removesuffix('(')}` in {count} places, not in {_LOOPS}"
    if "self.max_num_scheduled_tokens" not in source or "token_budget" not in source:
        yield "`schedule` has no token budget"
    names = _names(parts.scheduler)
    for name in (_FLAG, "max_num_scheduled_tokens", "kv_cache_manager", "vllm_config", "requests", "running"):
        if name not in names:
            yield f"it has no `{name}`"
    if "num_computed_tokens +=" not in inspect.getsource(parts.scheduler._update_after_schedule):
        yield "tokens are not counted as computed when they are scheduled"


def _queue_faults(parts: Any) -> Iterator[str]:
    source = inspect.getsource(parts.scheduler.__init__)
    found = set(re.findall(r"self\.(\w+) = create_request_queue\(", source))
    if "waiting" not in found:
        yield "it has no queue `waiting`"
    for name in sorted(found - set(QUEUES)):
        yield f"it has a queue `{name}`"
    for name in ("add_request", "remove_request", "__iter__"):
        if not callable(getattr(parts.queue, name, None)):
            yield f"its queues have no `{name}`"


def _cache_faults(parts: Any) -> Iterator[str]:
    for owner, method, parameters in (
        (parts.manager, "get_computed_blocks", ["self", "request"]),
        (parts.manager, "create_kv_cache_blocks", ["self", "blocks"]),
        (parts.coordinator, "cache_blocks", ["self", "request", "num_computed_tokens"]),
    ):
        function = getattr(owner, method, None)
        found = list(inspect.signature(function).parameters) if function is not None else []
        if found[: len(parameters)] != parameters:
            yield f"`{owner.__name__}.{method}` takes ({', '.join(found[1:])})" if found else f"there is no `{method}`"
    for method in ("allocate_slots", "cache_blocks"):
        if "self.coordinator.cache_blocks(" not in inspect.getsource(getattr(parts.manager, method)):
            yield f"`{parts.manager.__name__}.{method}` fills the prefix cache in another way"
    if "single_type_managers" not in _names(parts.coordinator):
        yield "the cache's coordinator has no `single_type_managers`"


def _shared_names(parts: Any, ours: ModuleType) -> Iterator[str]:
    """Names that both use by chance; our methods that are meant to replace vLLM's are known."""
    mixin = ours.DecodeFirstSteps
    mine = {name for name in vars(mixin) if not name.startswith("__")} - _REPLACED
    mine |= _names(mixin) - {_FLAG}
    theirs = set(dir(parts.async_scheduler)) | _names(parts.scheduler) | _names(parts.async_scheduler)
    for name in sorted(mine & theirs):
        yield f"it has a `{name}` of its own"


def _names(owner: type) -> set[str]:
    """Attributes that `__init__` gives to an object."""
    return set(re.findall(r"self\.(\w+)(?::[^=\n]+)? = ", inspect.getsource(owner.__init__)))  # type: ignore[misc]
