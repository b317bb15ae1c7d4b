"""Alerts and dashboard: sound by promtool, made as they should be, and of metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics_page import full_page
from prometheus_process import tool

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
PAGE = Path(__file__).parents[2] / "docs" / "monitoring" / "metrics.md"
_SUFFIXES = ("", "_total", "_bucket", "_count", "_sum", "_info")


def known() -> set[str]:
    """Every name under which a sample can come."""
    found = set()
    for family in text_string_to_metric_families(full_page()):
        kept = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_count", "_sum"),
            "summary": ("_count", "_sum"),
        }.get(family.type, ("",))
        found |= {family.name + suffix for suffix in kept}
    return found


def promtool(*arguments: str) -> str:
    found = subprocess.run(
        [tool("promtool"), *arguments], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def test_promtool_takes_the_rules_and_the_configuration() -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", "alerts.yml")
    assert "SUCCESS" in promtool("check", "config", "--lint-fatal", "prometheus.yml")


def test_each_alert_fires_and_keeps_quiet_as_it_should() -> None:
    promtool("test", "rules", "alerts_test.yml")
    alerts = set(re.findall(r"alert: (\w+)", (FOLDER / "alerts.yml").read_text()))
    cases = (FOLDER / "alerts_test.yml").read_text()
    tested = set(re.findall(r"- alertname: (\w+)", cases))
    assert tested == alerts


def test_promtool_finds_the_metrics_well_named() -> None:
    found = subprocess.run(
        [tool("promtool"), "check", "metrics"],
        input=full_page(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@pytest.mark.parametrize("name", ["alerts.yml", "alerts_test.yml", "dashboard.json"])
def test_every_metric_that_is_asked_for_exists(name: str) -> None:
    asked = set(re.findall(r"\bpingpong_\w+", (FOLDER / name).read_text()))
    assert asked
    assert asked <= known()


def test_the_dashboard_is_what_its_maker_makes() -> None:
    found = subprocess.run(
        [sys.executable, str(FOLDER / "make_dashboard.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_panels_do_not_overlap_and_each_says_what_it_shows() -> None:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["title"]
        assert panel["type"] == "row" or panel["targets"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_page_names_every_metric_and_no_other() -> None:
    told = set(re.findall(r"`(pingpong_\w+)", PAGE.read_text()))
    families = {family.name for family in text_string_to_metric_families(full_page())}
    names = {name for name in known() if name.startswith("pingpong_")}
    assert told <= names | families
    for family in families:
        if family.startswith("pingpong_"):
            assert any(family + suffix in told for suffix in _SUFFIXES), f"{family} is not in {PAGE.name}"
