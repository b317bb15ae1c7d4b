"""The configuration of a daemon with many simulated H200s, and what the timing model says of a chain on them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from group_load import ChainSize
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.simulated_timing import TimingModel
from pingpongd.config import load_config, parse_config

H200 = Path(__file__).with_name("h200_simulated.toml")
_FEW_ROWS = 64
"""Steps up to here are decodes and finalizes."""
_SLOTS = 4096
_SLOT_TOKENS = 512


class GroupsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How many groups, and in what time; see `many_groups.py`."""

    groups: int
    time_scale: float = 1.0
    token_stretch: int = 1

    @property
    def timing(self) -> SimulatedSettings:
        """The timing model of each engine."""
        return stretched(load_config(H200).simulated, self.token_stretch, self.time_scale)


def stretched(settings: SimulatedSettings, tokens: int, time_scale: float) -> SimulatedSettings:
    """An engine whose decode steps take as long as `tokens` of them; its prefills take what they took."""
    slow = max(ms for rows, ms in settings.step_rows if rows <= _FEW_ROWS) * tokens
    return msgspec.structs.replace(
        settings,
        step_rows=[
            (rows, ms * tokens if rows <= _FEW_ROWS else max(ms, slow + rows * 1e-6)) for rows, ms in settings.step_rows
        ],
        decode_context_ns=(settings.decode_context_ns or 0.0) * tokens,
        time_scale=time_scale,
    )


def groups_toml(settings: GroupsSettings, calibrate: bool) -> str:
    """A configuration file. Heartbeats come every second of real time: so the idle daemon is in real time whatever
    the scale."""
    top = {
        "instance": "many-groups",
        "engine": "simulated",
        "slots": _SLOTS,
        "slot_tokens": _SLOT_TOKENS,
        "calibrate": calibrate,
    }
    # Beside a decode step that stands for eight a whole prefill seems cheap, so that `auto` would take overlap for all.
    decode_first = {"enabled": settings.token_stretch == 1}
    watch = {"heartbeat_s": 1.0, "misses": 60, "stall_s": 600.0}  # a machine that is busy is no reason to restart
    lines = [*keys(top), "[decode_first]", *keys(decode_first), "[watch]", *keys(watch), "[simulated]"]
    lines += keys({key: value for key, value in msgspec.to_builtins(settings.timing).items() if value is not None})
    for index in range(settings.groups):
        lines += ["[[groups]]", f'name = "g{index}"', f'devices = ["simulated:{index}"]']
    return "\n".join(lines) + "\n"


def worker_config(settings: GroupsSettings) -> WorkerConfig:
    """What a worker of these groups is told, as far as its engine's figures depend on it."""
    config = parse_config(tomllib.loads(groups_toml(settings, calibrate=True)))
    group = config.groups[0]
    return WorkerConfig(
        name=group.name,
        devices=group.devices,
        engine=config.engine,
        session=config.session,
        decode_first=config.decode_first.enabled,
        paces=(config.decode_first.final, config.decode_first.inner),
        simulated=config.simulated,
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=0,
    )


def keys(values: dict[str, Any]) -> list[str]:
    """Lines of a TOML table."""
    # JSON's strings, numbers and arrays are TOML's, too.
    return [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items()]


def decode_ms(settings: GroupsSettings, context: int) -> float:
    """A decode step alone, by the timing model."""
    model = TimingModel(settings.timing)
    return model.price(1, model.work(context, 1, decode=True), "decodes") * 1e3


def prefill_ms(settings: GroupsSettings, tokens: int) -> float:
    """From a request's submission to its first token, with nothing cached and nothing beside it."""
    model, most = TimingModel(settings.timing), settings.timing.max_num_batched_tokens
    seconds = model.admission_s(tokens)
    for computed in range(0, tokens, most):
        step = min(most, tokens - computed)
        seconds += model.price(step, model.work(computed, step, decode=False), "prompts")
    return seconds * 1e3


def expected_chain_ms(settings: GroupsSettings, size: ChainSize) -> float:
    """A chain alone whose downstream prefills are hidden: the first agent's prefill, and all decode steps."""
    context = size.prefix + size.output + size.suffix
    return prefill_ms(settings, size.prefix + size.suffix) + sum(size.outputs) * decode_ms(settings, context)
