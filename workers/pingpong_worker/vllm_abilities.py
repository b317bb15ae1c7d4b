"""What patches to vLLM (`patches/`) give an engine, how one that has them is told, and what we do with each.

- `append-without-sampling`: appends have ``max_tokens=0``. No token is sampled behind them, so a streaming-input
  session draws nothing before its answer, and sampled agents may have one too.
- `idle-sessions-give-way`: streaming-input sessions need no memory of their own (`vllm_guards.Reservations`).
- `prefill-progress`: the meter hears of each step that computes a part of a prompt, so that an engine that stands still
  in the middle of one is told from one that works.
- `seeded-split-prefill`: `vllm_cpu_worker.py` need not keep generators from rows whose prompt is not through.
- `die-with-parent`: nothing; `vllm_plugin.py` sees to that for our engines on any vLLM.
- `chunk-max-tokens`, `fresh-block-hashes` (vLLM 0.24): `vllm_scheduler.SessionFixes` does no harm beside them.

An engine is known by what stands in its files: importing them all would take this process seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pingpong_bus.errors import ConfigError

APPEND_WITHOUT_SAMPLING = "append-without-sampling"
IDLE_SESSIONS_GIVE_WAY = "idle-sessions-give-way"
PREFILL_PROGRESS = "prefill-progress"

STATE_FILE = ".pingpongd-patch/state.json"
"""Where in vLLM's package `pingpongd patch` writes what it is about to do."""
_SCHEDULER = "v1/core/sched/scheduler.py"
MARKS = {
    "chunk-max-tokens": (_SCHEDULER, "    chunks_have_max_tokens = True\n"),
    "fresh-block-hashes": (_SCHEDULER, "    chunks_drop_stale_hashes = True\n"),
    APPEND_WITHOUT_SAMPLING: (_SCHEDULER, "    supports_prefill_only = True\n"),
    IDLE_SESSIONS_GIVE_WAY: (_SCHEDULER, "    idle_sessions_give_way = True\n"),
    PREFILL_PROGRESS: (_SCHEDULER, "    reports_prefill_progress = True\n"),
    "die-with-parent": ("utils/system_utils.py", "\nCHILDREN_DIE_WITH_PARENT = True\n"),
    "seeded-split-prefill": ("v1/worker/gpu_model_runner.py", "    splits_seeded_prompts = True\n"),
}
"""For each ability the file of the package, and the line in it, by which its patch announces it."""


class _State(msgspec.Struct):
    vllm: str
    done: bool


def check_patched_whole(version: str, folders: Iterable[Path] | None = None) -> None:
    """See that no run of `pingpongd patch` has left vLLM patched in part: such an engine fails in its first step.

    Args:
        version: of vLLM; of another one nothing holds any more.
        folders: of its package; None: of the one that this process would import.

    Raises:
        ConfigError: a run was cut short, or is under way.
    """
    package = next(iter(_folders() if folders is None else folders), None)
    try:
        state = msgspec.json.decode((package / STATE_FILE).read_bytes(), type=_State) if package else None
    except (OSError, msgspec.MsgspecError):
        return
    if state is not None and not state.done and state.vllm == version:
        raise ConfigError(
            "vLLM is patched in part: a run of `pingpongd patch` was cut short, or is under way.",
            hint="`pingpongd patch apply` completes it, `pingpongd patch revert` undoes it.",
        )


def installed_abilities() -> tuple[str, ...]:
    """The abilities of the vLLM that this process would import; none where there is no vLLM."""
    return abilities_of(_folders())


def _folders() -> list[Path]:
    spec = importlib.util.find_spec("vllm")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []


def abilities_of(folders: Iterable[Path]) -> tuple[str, ...]:
    """The abilities of a vLLM, in the order of `MARKS`.

    Args:
        folders: of its package; there is one.
    """
    package = next(iter(folders), None)
    if package is None:
        return ()
    texts: dict[str, str] = {}
    for file, _ in MARKS.values():
        if file not in texts:
            path = package / file
            texts[file] = path.read_text("utf-8") if path.is_file() else ""
    return tuple(name for name, (file, line) in MARKS.items() if line in texts[file])
