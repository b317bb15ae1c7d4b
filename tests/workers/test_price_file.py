"""Prices on disk: found again by the same kind of engine, ignored where they are broken or another's."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from pingpong_worker.cache_files import EngineKind
from pingpong_worker.price_file import FORMAT, load_prices, price_path, save_prices
from pingpong_worker.step_prices import StepPrices

KIND = EngineKind(device="NVIDIA H200", model="Qwen/Qwen3-14B", dtype="bfloat16", engine="vllm 0.32.0")


def learnt() -> dict[str, object]:
    prices = StepPrices([1, 8])
    prices.learn(1, 10, 8e-3, "decodes")
    return prices.to_dict()


def test_prices_are_found_again(tmp_path: Path) -> None:
    assert load_prices(KIND, tmp_path / "new") is None
    save_prices(KIND, learnt(), tmp_path / "new")
    assert load_prices(KIND, tmp_path / "new") == learnt()
    assert [path.name for path in (tmp_path / "new").iterdir()] == [price_path(KIND).name]


@pytest.mark.parametrize("field", ["device", "model", "dtype", "engine"])
def test_another_kind_of_engine_has_another_file(tmp_path: Path, field: str) -> None:
    save_prices(KIND, learnt(), tmp_path)
    other = msgspec.structs.replace(KIND, **{field: "other"})
    assert price_path(other, tmp_path) != price_path(KIND, tmp_path)
    assert load_prices(other, tmp_path) is None


def test_names_are_plain(tmp_path: Path) -> None:
    kind = msgspec.structs.replace(KIND, model="/models/../" + "very-long/" * 50 + "Ünï cöde")
    path = price_path(kind, tmp_path)
    assert path.parent == tmp_path
    assert len(path.name) < 100
    assert path.name.isascii()


def test_the_cache_is_where_models_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert price_path(KIND).parent == tmp_path / "pingpongd" / "step-prices"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b'{"format": 2}',
        msgspec.json.encode({"format": 99, "kind": KIND, "prices": {}}),
        msgspec.json.encode({"format": FORMAT, "kind": KIND, "prices": {"graphs": [], "decodes": [[1]]}}),
        msgspec.json.encode({"format": FORMAT, "kind": KIND, "prices": {"graphs": []}}),
        msgspec.json.encode(
            {"format": FORMAT, "kind": msgspec.structs.replace(KIND, dtype="float32"), "prices": {"graphs": []}}
        ),
    ],
)
def test_a_broken_or_foreign_file_is_ignored_and_named(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = price_path(KIND, tmp_path)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_prices(KIND, tmp_path) is None
    assert str(path) in caplog.text


def test_no_room_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        save_prices(KIND, learnt(), tmp_path / "file")
    assert "not kept" in caplog.text
