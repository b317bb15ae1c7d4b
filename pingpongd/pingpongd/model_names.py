"""Which models there are, which of them groups serve, and which runs an agent; by name. Pure.

The daemon's default model has the name "" here; `without_default` makes chains that spell its name out say nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from pingpong_bus.chain import Chain
from pingpong_bus.errors import ChainError
from pingpongd.config import DaemonConfig, GroupConfig


def served_models(config: DaemonConfig) -> dict[str, str]:
    """The models that groups serve, in the groups' order: what is to be loaded (a folder, or a name), by name."""
    names = dict.fromkeys(group.model or "" for group in config.groups)
    return {name: config.models[name].model if name else config.model for name in names}


def engine_arguments(config: DaemonConfig, group: GroupConfig) -> dict[str, Any]:
    """Raw vLLM arguments of a group's engine: the common ones, over them its model's, over these its own."""
    return config.vllm | (config.models[group.model].vllm if group.model else {}) | group.vllm


def engine_dtype(config: DaemonConfig, group: GroupConfig) -> str:
    """The dtype of a group's engine: its model's, where that has one, else the daemon's."""
    return (config.models[group.model].dtype if group.model else None) or config.dtype


def without_default(chain: Chain, default: str) -> Chain:
    """The chain with no model named where that is the default one.

    Args:
        chain: the chain.
        default: what the daemon calls its default model.
    """
    if all(agent.model != default for agent in chain.agents):
        return chain
    agents = [msgspec.structs.replace(agent, model=None) if agent.model == default else agent for agent in chain.agents]
    return msgspec.structs.replace(chain, agents=agents)


def agent_models(chain: Chain) -> tuple[str | None, ...]:
    """Per agent, the name of the model that runs it; None of a step, which no model runs."""
    return tuple(None if agent.is_step else agent.model or "" for agent in chain.agents)


def check_models(chain: Chain, config: DaemonConfig, served: Collection[str]) -> None:
    """Refuse a chain that asks for a model that there is not.

    Args:
        chain: the chain.
        config: names the models.
        served: those of the groups that serve, or may do so again.

    Raises:
        ChainError: naming the agent, with the models that there are.
    """
    there = ", ".join(name or f"{config.model} (the default)" for name in ("", *config.models) if name in served)
    for index, name in enumerate(agent_models(without_default(chain, config.model))):
        if name is None or name in served:
            continue
        if not name:
            what = f"it names no model, and no group serves the default one, {config.model}"
        elif name in config.models:
            what = f'no group serves the model "{name}"'
        else:
            what = f'there is no model "{name}"'
        raise ChainError(f"{what}.", field=f"agents[{index}].model", hint=f"There are: {there}.")
