"""The report of the decode-first benchmark: which measurements are compared, and that both outputs are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_first_report import Measurement, percentile, plot, report, variants

HUNDRED = [float(number) for number in range(1, 101)]


def measurement(engine: str, appends: str, target: float | None, gaps: list[float], **changes: object) -> Measurement:
    usual = {"round": 0, "answer_ms": sum(gaps), "appends_ms": 500.0, "provenance": {"dtype": "bfloat16"}}
    return Measurement(engine=engine, appends=appends, target=target, gaps_ms=gaps, **{**usual, **changes})  # type: ignore[arg-type]


MEASURED = [
    measurement("stock", "none", None, [20.0] * 100),
    measurement("stock", "beside", None, [100.0] * 100),
    measurement("stock", "alone", None, [], appends_ms=400.0),
    measurement("decode first", "none", None, [20.0] * 100),
    measurement("decode first", "beside", 2.0, HUNDRED, beside_tokens=70),
    measurement("decode first", "beside", 2.0, HUNDRED, beside_tokens=90, round=1),
    measurement("decode first", "beside", 1.1, [22.0] * 100, beside_tokens=10),
    measurement("decode first", "alone", None, [], appends_ms=450.0),
]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile(HUNDRED, 99) == 99
    assert percentile(HUNDRED, 50) == 50
    assert percentile([3.0], 99) == 3.0
    assert percentile(HUNDRED[::-1], 100) == 100


def test_each_variant_is_held_against_answers_without_appends() -> None:
    stock, strict, lax = variants(MEASURED)
    assert (stock.name, stock.ratio, stock.beside_tokens) == ("stock", 5.0, None)
    assert (strict.target, strict.ratio) == (1.1, pytest.approx(1.1))
    assert (lax.p99_ms, lax.max_ms, lax.ratio, lax.beside_tokens) == (99.0, 100.0, pytest.approx(4.95), 80.0)


def test_report_and_picture(tmp_path: Path) -> None:
    text = report(MEASURED)
    assert "| decode first, target 1.1 | 22.0 | 22.0 | 22.0 | 20.0 | 1.10 |" in text
    assert "stock 400; decode first 450" in text
    plot(MEASURED, tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text("utf-8")
    assert drawn.startswith("<?xml")
