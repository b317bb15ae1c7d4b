"""What SIGHUP changes."""

from __future__ import annotations

from typing import Any

import pytest

from pingpongd.config import DaemonConfig, parse_config
from pingpongd.reload import merge


def config(**keys: Any) -> DaemonConfig:
    return parse_config({"engine": "simulated", "groups": [{"name": "a", "devices": ["cpu:0"]}]} | keys)


@pytest.mark.parametrize(
    ("read", "changed", "needs_restart"),
    [
        ({}, [], []),
        ({"exactness": "invariant", "batch_invariant": True}, [], ["batch_invariant", "exactness"]),
        ({"exactness": "grid"}, ["exactness"], []),
        ({"grid_tokens": 64, "batch_invariant": True}, [], ["grid_tokens", "batch_invariant"]),
        ({"decode_first": {"final": 1.1}}, ["decode_first"], []),
        ({"decode_first": {"enabled": False}}, [], ["decode_first.enabled"]),
        ({"decode_first": {"enabled": False, "inner": 4.0}}, ["decode_first"], ["decode_first.enabled"]),
        ({"slots": 3, "max_queued": 7}, ["max_queued"], ["slots"]),
    ],
)
def test_what_can_be_changed_is_and_what_cannot_is_named(
    read: dict[str, Any], changed: list[str], needs_restart: list[str]
) -> None:
    reload = merge(config(), config(**read))
    assert (reload.changed, reload.needs_restart) == (changed, needs_restart)
    assert reload.config.decode_first.enabled
    assert reload.config.slots == config().slots
    paces = read.get("decode_first", {})
    assert reload.config.decode_first.inner == paces.get("inner", 1.5)
    assert reload.config.decode_first.final == paces.get("final", 1.2)
