"""A shipped configuration on a machine that allows other cores than it names, as a container may."""

from __future__ import annotations

import re
from collections.abc import Collection

from pingpong_bus.errors import ConfigError

_CORE = re.compile(r'(?<="cpu:)\d+(?=")')


def on_allowed_cores(config: str, allowed: Collection[int]) -> str:
    """A configuration's text with its cores, such as in "cpu:1", replaced by allowed ones if it names any other.

    Args:
        config: TOML, with one core for each device.
        allowed: the cores that this process may use.

    Raises:
        ConfigError: there are fewer than the configuration names.
    """
    named = sorted({int(core) for core in _CORE.findall(config)})
    if set(named) <= set(allowed):
        return config
    if len(allowed) < len(named):
        raise ConfigError(
            f"the configuration takes {len(named)} CPU cores and this process may use {len(allowed)}.",
            hint="Give the container or the process more of them.",
        )
    chosen = dict(zip(named, sorted(allowed), strict=False))
    return _CORE.sub(lambda match: str(chosen[int(match.group())]), config)
