"""The JSON Schema that is shipped is the one that the structs give."""

from __future__ import annotations

import json
from importlib.resources import files

from pingpong_bus.chain import json_schema


def test_the_shipped_schema_is_current() -> None:
    shipped = json.loads(files("pingpong_bus").joinpath("chain.schema.json").read_text(encoding="utf-8"))
    assert shipped == json_schema(), "run: pingpong-client schema > bus/pingpong_bus/chain.schema.json"
