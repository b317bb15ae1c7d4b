"""What `pingpongd check` says about `[calls]`; nothing is called."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping

from pingpong_bus.errors import ConfigError
from pingpongd.calls import resolve_calls
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.config import DaemonConfig


def call_findings(config: DaemonConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the variables and programs are there that calls name.

    Args:
        config: the daemon's.
        environment: that it will have.
    """
    if not config.calls:
        return
    try:
        resolve_calls(config.calls, environment)
    except ConfigError as error:
        yield failed("calls", error)
        return
    path, missing = environment.get("PATH", os.defpath), False
    for name, call in config.calls.items():
        if call.command is not None and shutil.which(call.command[0], path=path) is None:
            missing = True
            yield doubtful(
                "calls",
                f'the program {call.command[0]} of "{name}" cannot be found, so that chains which call it fail.',
                "Install it, or give its whole path.",
            )
    if not missing:
        yield passed("calls", ", ".join(config.calls))
