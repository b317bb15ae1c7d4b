"""What a configuration that was read again changes, and what it cannot change before the next start. Pure."""

from __future__ import annotations

import msgspec

from pingpongd.config import DaemonConfig

CHANGEABLE = frozenset(
    {
        "chunks",
        "drain_seconds",
        "log_dir",
        "log_level",
        "log_worker_output",
        "max_queued",
        "restart",
        "start_seconds",
        "store",
        "watch",
    }
)
"""Keys that take effect at once. The others name devices, folders, engines or memory that are in use."""


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
    config = msgspec.structs.replace(running, **{name: getattr(read, name) for name in changed})
    return Reload(config, changed, [name for name in differ if name not in CHANGEABLE])
