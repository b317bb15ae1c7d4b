"""Whether the configured devices are there, each claimed once, and can have what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pingpong_bus.errors import ConfigError
from pingpong_worker.host_cache import host_cache_refusal
from pingpong_worker.pinning import check_cores, check_devices, cuda_uuids, parse_device, present_cores
from pingpongd.config import DaemonConfig, GroupConfig
from pingpongd.model_names import engine_arguments


def check_groups(config: DaemonConfig) -> None:
    """Raise ConfigError for a device that is not there, is claimed twice, or cannot have what is configured."""
    owners: dict[str, str] = {}
    for index, group in enumerate(config.groups):
        try:
            if config.engine == "vllm":
                check_devices(group.devices, present_cores(), cuda_uuids)
                for device in claimed(group.devices, cuda_uuids):
                    if device in owners:
                        raise ConfigError(
                            f'{device} is in group "{owners[device]}" already.',
                            field="devices",
                            hint="An engine wants its devices for itself.",
                        )
                    owners[device] = group.name
                _check_host_cache(config, group)
            check_cores(group.cores, present_cores(), "cores")
        except ConfigError as error:
            if error.field == "prefixes.host_gib":
                raise ConfigError(
                    f'group "{group.name}": {error.message}', hint=error.hint, field=error.field
                ) from None
            raise ConfigError(error.message, hint=error.hint, field=f"groups[{index}].{error.field}") from None


def _check_host_cache(config: DaemonConfig, group: GroupConfig) -> None:
    if config.prefixes.host_gib:
        refusal = host_cache_refusal(group.devices, config.session, engine_arguments(config, group))
        if refusal is not None:
            raise refusal


def claimed(devices: Sequence[str], uuids: Callable[[], Sequence[str]]) -> list[str]:
    """Every core and GPU of a group by one name, however the configuration names it.

    Args:
        devices: that have been checked.
        uuids: lists this machine's GPUs; called only where a GPU is named by its index.
    """
    found: list[str] = []
    for device in devices:
        parsed = parse_device(device)
        if isinstance(parsed, list):
            found += [f"core {core}" for core in parsed]
        else:
            found.append(uuids()[parsed] if isinstance(parsed, int) else parsed)
    return found
