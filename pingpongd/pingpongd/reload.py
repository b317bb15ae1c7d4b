"""What a configuration that was read again changes, and what it cannot change before the next start. Pure."""

from __future__ import annotations

import msgspec

from pingpong_bus.errors import ConfigError
from pingpongd.config import DaemonConfig, check_exactness

CHANGEABLE = frozenset(
    {
        "calls",
        "chunks",
        "decode_first",
        "drain_seconds",
        "exactness",
        "jitter",
        "log_dir",
        "log_level",
        "log_prompts",
        "log_worker_output",
        "max_queued",
        "restart",
        "start_seconds",
        "store",
        "watch",
    }
)
"""Keys that take effect at once. The others name devices, folders, engines or memory that are in use; so does `enabled`
of `decode_first`, whose other keys hold for what is dispatched from then on."""


class Reload(msgspec.Struct, frozen=True):
    """The outcome of reading a configuration again."""

    config: DaemonConfig
    """The running one with every change that can be made."""
    changed: list[str]
    """Keys that were changed."""
    needs_restart: list[str]
    """Keys that differ in the file and stay as they are until the next start."""


def merge(running: DaemonConfig, read: DaemonConfig) -> Reload:
    """Take over from `read` what can be changed while the daemon runs."""
    differ = [name for name in running.__struct_fields__ if getattr(running, name) != getattr(read, name)]
    changed = [name for name in differ if name in CHANGEABLE]
    needs_restart = [name for name in differ if name not in CHANGEABLE]
    config = msgspec.structs.replace(running, **{name: getattr(read, name) for name in changed})
    if config.decode_first.enabled != running.decode_first.enabled:  # the engines have their scheduler
        paces = msgspec.structs.replace(config.decode_first, enabled=running.decode_first.enabled)
        config = msgspec.structs.replace(config, decode_first=paces)
        needs_restart.append("decode_first.enabled")
        if paces == running.decode_first:
            changed.remove("decode_first")
    try:
        check_exactness(config)
    except ConfigError:  # the new default level takes another key that was changed, and that needs a restart
        config = msgspec.structs.replace(config, exactness=running.exactness)
        changed.remove("exactness")
        needs_restart.append("exactness")
    return Reload(config, changed, needs_restart)
