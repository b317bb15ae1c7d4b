"""The configuration: what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pingpong_bus.errors import ConfigError
from pingpongd.config import load_config, parse_config
from pingpongd.model_names import engine_arguments, engine_dtype, served_models

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUP = {"name": "a", "devices": ["cpu:0"]}


def test_the_example_is_valid() -> None:
    config = load_config(EXAMPLES / "cpu.toml")
    assert [group.name for group in config.groups] == ["cpu0", "cpu1"]
    assert config.vllm["max_model_len"] == 4096
    assert config.log_capacity == 8192  # a step that says nothing may write so many characters


def test_flags_come_over_the_file() -> None:
    assert load_config(EXAMPLES / "cpu.toml", {"model": "other"}).model == "other"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "groups: the key is missing"),
        ({"groups": []}, "groups: expected `array` of length >= 1"),
        ({"groups": [GROUP], "modle": "x"}, "modle: there is no such key"),
        ({"groups": [GROUP | {"device": "x"}]}, r"groups\[0\]\.device: there is no such key"),
        ({"groups": [GROUP], "slots": 0}, "slots: expected `int` >= 1"),
        ({"groups": [GROUP], "engine": "other"}, "engine: invalid enum value 'other'"),
        ({"groups": [GROUP, GROUP]}, r'groups\[1\]\.name: two groups are called "a"'),
        ({"groups": [GROUP, GROUP | {"name": "b"}]}, r'groups\[1\]\.devices: the device cpu:0 is in group "a"'),
        ({"groups": [{"name": "a", "devices": []}]}, r"groups\[0\]\.devices"),
        ({"groups": [GROUP], "jitter": {"probe_s": float("inf")}}, r"jitter\.probe_s: expected `float` <= 3600"),
        ({"groups": [GROUP], "jitter": {"log_s": float("inf")}}, r"jitter\.log_s: expected `float` <= 3600"),
        ({"groups": [GROUP], "http": {"listen": "9464"}}, r"^http\.listen: expected HOST:PORT, such as "),
        ({"groups": [GROUP], "simulated": {"step_ms": -1}}, r"^simulated\.step_ms: -1.0 is below 0"),
        ({"groups": [GROUP], "decode_first": {"final": 0.9}}, r"decode_first\.final: expected `float` >= 1"),
        ({"groups": [GROUP], "decode_first": {"final": 3.0}}, r"decode_first\.inner: agents that others read \(1\.5\)"),
        ({"groups": [GROUP], "exactness": "grids"}, "exactness: invalid enum value 'grids'"),
        ({"groups": [GROUP], "exactness": "invariant"}, 'exactness: "invariant" .* batch-invariant kernels'),
        ({"groups": [GROUP], "exactness": "grid", "decode_first": {"enabled": False}}, "exactness: .* scheduler"),
        ({"groups": [GROUP], "exactness": "grid", "session": "streaming-input"}, "exactness: .* streaming-input"),
        ({"groups": [GROUP], "grid_tokens": 0}, "grid_tokens: expected `int` >= 1"),
        ({"groups": [GROUP | {"simulated": {"kv_tokens": 0}}]}, r"^groups\[0\]\.simulated\.kv_tokens: 0 is below 1"),
    ],
)
def test_a_wrong_key_or_value_is_named(document: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


@pytest.mark.parametrize(
    ("data", "message"), [(b"groups = [", "is not TOML"), (b"\xff", "is not UTF-8"), (None, "no configuration file")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "c.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "c.toml" in str(caught.value)


def test_models_are_named_by_groups() -> None:
    models = {"large": {"model": "org/large", "dtype": "float16", "vllm": {"max_model_len": 9000, "x": 1}}}
    groups = [
        {"name": "a", "devices": ["cpu:0"], "model": "small"},
        {"name": "b", "devices": ["cpu:1"], "model": "large", "vllm": {"x": 2}},
    ]
    config = parse_config(
        {"model": "small", "models": models, "groups": groups, "vllm": {"max_model_len": 100, "y": 0}}
    )
    assert [group.model for group in config.groups] == [None, "large"]
    assert served_models(config) == {"": "small", "large": "org/large"}
    assert engine_arguments(config, config.groups[0]) == {"max_model_len": 100, "y": 0}
    assert engine_arguments(config, config.groups[1]) == {"max_model_len": 9000, "x": 2, "y": 0}
    assert [engine_dtype(config, group) for group in config.groups] == ["auto", "float16"]
    assert config.log_capacity == 9000
    large_alone = parse_config({"models": models, "groups": groups[1:]})
    assert served_models(large_alone) == {"large": "org/large"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"groups": [{"name": "a", "devices": ["cpu:0"], "model": "huge"}]},
            'groups\\[0\\].model: there is no model "huge"',
        ),
        ({"models": {"small": {"model": "x"}}}, '"small" is the default model'),
        ({"models": {"": {"model": "x"}}}, '"" is the default model'),
        ({"models": {"large": {}}}, "^models.large.model: the key is missing"),
        ({"models": {"fine": {"model": "x"}, "large": {}}, "slots": "many"}, "^models.large.model: the key is missing"),
    ],
)
def test_a_model_that_cannot_be_is_named(document: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"model": "small", "groups": [{"name": "a", "devices": ["cpu:0"]}]} | document)
