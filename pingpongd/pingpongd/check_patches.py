"""Is the installed vLLM patched, and are its files whole? See `patch_command.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pingpong_bus.errors import ConfigError, PingpongError
from pingpong_worker.vllm_abilities import check_patched_whole
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.config import DaemonConfig
from pingpongd.patch_folder import load_series, shipped, versions
from pingpongd.patch_work import KEPT, look
from pingpongd.vllm_installation import find_vllm


def patch_findings(
    config: DaemonConfig | None, vllm: Path | None = None, patches: Path | None = None
) -> Iterator[Finding]:
    """Which patches are applied; nothing to say of the simulated engine, or where there is no vLLM.

    Args:
        vllm: its folder; None: where Python finds it.
        patches: their folder; None: those that are shipped.
    """
    if config is not None and config.engine != "vllm":
        return
    folder = patches or shipped()
    try:
        installation = find_vllm(vllm)
    except ConfigError:
        return  # which the engine's own finding says
    if installation.version not in versions(folder):
        known = " and ".join(versions(folder))
        yield passed("patches", f"none to vLLM {installation.version}; there are to {known}, and it serves without.")
        return
    try:
        check_patched_whole(installation.version, [installation.package])
        series = load_series(folder, installation.version)
        found = look(installation, series)
    except PingpongError as error:
        yield failed("patches", error)
        return
    applied = series.applied(found.hashes)
    counted = f"{len(applied)} of {len(series.patches)} patches to vLLM {installation.version} are applied"
    if found.foreign:
        yield doubtful(
            "patches",
            f"{installation.site / found.foreign[0]} is neither as released nor as our patches leave it.",
            "It may be a build of its own, which serves; to patch it, install the release.",
        )
    elif found.other or found.cut_short(series):
        why = "an earlier release of pingpongd has left them" if found.other else "no whole patch leaves them"
        yield doubtful("patches", f"{counted}, and files are as {why}.", "Run pingpongd patch apply, or revert.")
    elif found.lost:
        yield doubtful("patches", f"{counted}, and {KEPT} is gone or damaged.", "Run pingpongd patch apply, or revert.")
    else:
        yield passed("patches", f"{counted}.")
