"""`pingpongd check`: examines configuration and machine, and says what to do; leaves all as it was.

The `check_*` files judge facts; this one gathers and prints. A line for each finding:

    ok       devices      cpu0 on cpu:0, cpu1 on cpu:1
    warning  memlock      64 KiB of memory may be locked. Set LimitMEMLOCK=infinity.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pingpong_bus.errors import ConfigError
from pingpongd import check_engine, check_machine, check_monitoring, check_places
from pingpongd.check_calls import call_findings
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.check_patches import patch_findings
from pingpongd.config import DaemonConfig

_CANNOT_WORK = 78


def check(load: Callable[[], DaemonConfig], *, as_json: bool) -> int:
    """Print what is found on standard output.

    Args:
        load: reads the configuration, or raises ConfigError.
        as_json: print objects with ``name``, ``level``, ``text`` and ``hint``.

    Returns:
        The exit code: 0, or 78 where something can never work.
    """
    code = 0
    for finding in findings(load):
        line = msgspec.json.encode(finding).decode() if as_json else str(finding)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if finding.level == "error":
            code = _CANNOT_WORK
    return code


def findings(load: Callable[[], DaemonConfig]) -> Iterator[Finding]:
    """Everything that there is to say; some of it takes seconds to find out."""
    try:
        config = load()
    except ConfigError as error:
        yield failed("config", error)
        yield from check_engine.engine_findings(None)
        yield check_machine.clock_finding(None)
        return
    yield passed(
        "config",
        f"instance {config.instance}, {len(config.groups)} groups, engine {config.engine}, model {config.model}",
    )
    yield passed("exactness", exactness_line(config))
    if config.speculation.enabled:
        yield speculation_finding(config)
    if config.prefixes.host_gib and config.engine != "vllm":
        yield doubtful("prefixes", "the simulated engine has no host memory for prefixes.", "Leave `host_gib` out.")
    yield from call_findings(config, os.environ)
    where = check_places.find_places(config, os.environ)
    yield from check_engine.engine_findings(config)
    yield from patch_findings(config)
    yield from check_engine.model_findings(config, where.cache, where.uid)
    yield from check_machine.machine_findings(config)
    yield from check_places.place_findings(config, where)
    yield from check_monitoring.monitoring_findings(config, os.environ)
    yield check_machine.clock_finding(_newest(where.state))
    yield from check_places.unit_findings(config.instance)


def exactness_line(config: DaemonConfig) -> str:
    """What chains are run at that ask for nothing, and how much appends may slow decodes."""
    cell = f"{config.grid_tokens} tokens" if config.grid_tokens else "what is best on the devices"
    kernels = "" if config.batch_invariant else "not "
    paces = config.decode_first
    scheduler = (
        f"decodes first: steps up to {paces.final:g} x as long for final agents, {paces.inner:g} x for inner ones"
        if paces.enabled
        else "vLLM's own scheduler, so no overlap and no grid"
    )
    return f"{config.exactness}; cell of the grid: {cell}; kernels {kernels}batch-invariant; {scheduler}"


def speculation_finding(config: DaemonConfig) -> Finding:
    """Whether what is set of guessed tokens can come to anything."""
    guessed = config.speculation
    if config.engine != "vllm":
        return doubtful("speculation", "the simulated engine guesses no tokens.", "Leave `[speculation]` out.")
    if config.batch_invariant:
        return doubtful(
            "speculation", "batch-invariant engines guess no tokens.", "Leave `[speculation]` or `batch_invariant` out."
        )
    if config.exactness == "grid":
        return doubtful(
            "speculation",
            'the default exactness "grid" rules guessed tokens out, so only chains that ask for "fast" have any.',
            'Set `exactness = "fast"`, or submit with --exactness fast.',
        )
    kept = f"the last {guessed.runs} runs of each agent" if guessed.runs else "no earlier runs"
    return passed("speculation", f"up to {guessed.tokens} tokens a step, from prompts and {kept}")


def _newest(folder: Path) -> float | None:
    """When the daemon last wrote there, in seconds since the epoch; None: never, or it cannot be seen."""
    try:
        return max((entry.stat().st_mtime for entry in folder.iterdir()), default=None)
    except OSError:
        return None
