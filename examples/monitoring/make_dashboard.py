"""Makes dashboard.json, a Grafana dashboard of pingpongd: `python make_dashboard.py`, with `--check` only compares.

Import the file in Grafana (Dashboards, New, Import), or put it where a provider of dashboards looks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("dashboard.json")
_WIDTH = 24
_RATE = "$__rate_interval"
_HERE = 'job=~"$job", instance=~"$instance"'
_GROUP = f'{_HERE}, worker=~"$worker"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Okabe and Ito's colours: told apart by the colour-blind, too.
_CAUSES = {
    "thermal_throttle": "#D55E00",
    "power_throttle": "#E69F00",
    "foreign_process": "#CC79A7",
    "cpu_starvation": "#0072B2",
    "memory_pressure": "#56B4E9",
    "garbage_collection": "#009E73",
    "own_appends": "#F0E442",
    "engine_stall": "#000000",
    "device_fault": "#882255",
    "unknown": "#999999",
}


def quantile(share: float, metric: str, by: str, where: str = _HERE) -> str:
    """A quantile of a histogram, over the interval that a point of the picture stands for."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate(pingpong_{metric}_bucket{{{where}}}[{_RATE}])))"


def rate(metric: str, by: str, where: str = _HERE) -> str:
    """A counter's growth a second."""
    return f"sum by ({by}) (rate(pingpong_{metric}{{{where}}}[{_RATE}]))"


def now(metric: str, where: str = _GROUP) -> str:
    """A gauge."""
    return f"pingpong_{metric}{{{where}}}"


Queries = dict[str, str]
"""By the legend of what they give."""


def graph(title: str, text: str, unit: str, queries: Queries, width: int = 8, *, stack: bool = False) -> dict[str, Any]:
    """Lines over time."""
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 25 if stack else 0, "showPoints": "never"}
    if stack:
        custom["stacking"] = {"mode": "normal"}
    return {
        "type": "timeseries",
        "title": title,
        "description": text,
        "gridPos": {"w": width, "h": 7},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": _targets(queries),
    }


def number(title: str, text: str, unit: str, query: str, steps: list[tuple[float | None, str]]) -> dict[str, Any]:
    """One number now; `steps` has from where which colour is shown."""
    return {
        "type": "stat",
        "title": title,
        "description": text,
        "gridPos": {"w": 4, "h": 4},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "thresholds": {"mode": "absolute", "steps": [{"value": at, "color": name} for at, name in steps]},
            },
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
        "targets": [_target(query, "", "A") | {"instant": False}],
    }


def causes() -> dict[str, Any]:
    """Why each group's tokens come late, over time."""
    mapped = {str(number): {"text": name, "color": colour} for number, (name, colour) in enumerate(_CAUSES.items(), 1)}
    terms = " or ".join(
        f'max by (worker) (pingpong_jitter_cause{{{_GROUP}, cause="{name}"}} == 1) * {number}'
        for number, name in enumerate(_CAUSES, 1)
    )
    quiet = {"0": {"text": "steady", "color": "transparent"}}
    return {
        "type": "state-timeline",
        "title": "Why tokens came late",
        "description": "The cause of each episode, as its evidence said at the time.",
        "gridPos": {"w": 16, "h": 7},
        "fieldConfig": {
            "defaults": {
                "mappings": [{"type": "value", "options": quiet | mapped}],
                "custom": {"fillOpacity": 80, "lineWidth": 0},
            },
            "overrides": [],
        },
        "options": {"mergeValues": True, "showValue": "auto", "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [_target(f"({terms}) or max by (worker) (pingpong_worker_up{{{_GROUP}}}) * 0", "{{worker}}", "A")],
    }


def heat(title: str, text: str, query: str) -> dict[str, Any]:
    """A histogram over time."""
    return {
        "type": "heatmap",
        "title": title,
        "description": text,
        "gridPos": {"w": 8, "h": 7},
        "options": {
            "calculate": False,
            "yAxis": {"unit": "s"},
            "color": {"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64},
            "cellGap": 0,
        },
        "targets": [_target(query, "{{le}}", "A") | {"format": "heatmap"}],
    }


def _targets(queries: Queries) -> list[dict[str, Any]]:
    return [_target(query, legend, chr(ord("A") + at)) for at, (legend, query) in enumerate(queries.items())]


def _target(query: str, legend: str, name: str) -> dict[str, Any]:
    return {"datasource": _SOURCE, "refId": name, "expr": query, "legendFormat": legend}


_GOOD: list[tuple[float | None, str]] = [(None, "green")]
ROWS: dict[str, list[dict[str, Any]]] = {
    "Now": [
        number(
            "Groups that serve",
            "Of all that are configured.",
            "percentunit",
            f"avg(pingpong_worker_up{{{_HERE}}})",
            [(None, "red"), (0.01, "orange"), (1, "green")],
        ),
        number(
            "Groups whose tokens come late",
            "`auto` gives them no new agents while another can take them.",
            "none",
            f'sum(pingpong_jitter_state{{{_HERE}, state="degraded"}})',
            [(None, "green"), (1, "orange")],
        ),
        number("Chains running", "", "none", f'sum(pingpong_chains{{{_HERE}, state="running"}})', _GOOD),
        number(
            "Chains waiting",
            "For their turn: a slot of the slab for each agent.",
            "none",
            f'sum(pingpong_chains{{{_HERE}, state="queued"}})',
            [(None, "green"), (100, "orange")],
        ),
        number(
            "Time between tokens, p99",
            "While nothing but decodes ran.",
            "s",
            quantile(0.99, "inter_token_latency_seconds", "", f'{_HERE}, kind="decode"'),
            _GOOD,
        ),
        number(
            "Event loop",
            "Since its latest tick; from 10 s on it counts as hung.",
            "s",
            f"max(pingpong_event_loop_tick_age_seconds{{{_HERE}}})",
            [(None, "green"), (3, "orange"), (10, "red")],
        ),
    ],
    "Chains": [
        graph(
            "Chains ended",
            "A second, by how.",
            "none",
            {"{{state}}, {{placement}}": rate("chains_ended_total", "state, placement")},
            stack=True,
        ),
        graph(
            "End to end",
            "Submission to last token.",
            "s",
            {
                "p50 {{placement}}": quantile(0.5, "e2e_chain_latency_seconds", "placement"),
                "p95 {{placement}}": quantile(0.95, "e2e_chain_latency_seconds", "placement"),
            },
        ),
        graph(
            "In the queue",
            "From the submission until a chain's turn.",
            "s",
            {
                "p50": quantile(0.5, "chain_queue_time_seconds", ""),
                "p95": quantile(0.95, "chain_queue_time_seconds", ""),
            },
        ),
        graph(
            "First token of a downstream agent",
            "From the last token that it reads: what reading ahead is for.",
            "s",
            {
                f"p{share:.0f} {{{{placement}}}}": quantile(
                    share / 100, "time_to_first_token_seconds", "placement", f'{_HERE}, role="downstream"'
                )
                for share in (50, 95)
            },
        ),
        graph(
            "Prefill, hidden and waited for",
            "Seconds a second: hidden behind an upstream's decoding, and exposed.",
            "none",
            {
                "hidden {{placement}}": rate("prefill_hidden_seconds_total", "placement"),
                "waited for {{placement}}": rate("prefill_exposed_seconds_total", "placement"),
            },
        ),
        graph(
            "Took, over predicted",
            "1 where `auto` predicts well.",
            "none",
            {"median {{placement}}": quantile(0.5, "chain_prediction_ratio", "placement")},
        ),
    ],
    "Steadiness": [
        causes(),
        graph(
            "Slowdown",
            "What a token takes, over what it should.",
            "none",
            {"{{worker}}": now("jitter_slowdown_ratio")},
        ),
        graph(
            "Time between tokens",
            "While nothing but decodes ran.",
            "s",
            {
                f"p{share:g} {{{{worker}}}}": quantile(
                    share / 100, "inter_token_latency_seconds", "worker", f'{_GROUP}, kind="decode"'
                )
                for share in (50, 99)
            },
        ),
        graph(
            "The same beside appends",
            "Held to `[decode_first]`.",
            "s",
            {
                f"p{share:g} {{{{worker}}}}": quantile(
                    share / 100, "inter_token_latency_seconds", "worker", f'{_GROUP}, kind="appends"'
                )
                for share in (50, 99)
            },
        ),
        heat(
            "Time between tokens, all",
            "Tokens a second by how long they took.",
            f'sum by (le) (rate(pingpong_inter_token_latency_seconds_bucket{{{_GROUP}, kind="decode"}}[{_RATE}]))',
        ),
        graph(
            "Episodes an hour",
            "By their first cause.",
            "none",
            {
                "{{worker}} {{cause}}": "sum by (worker, cause) "
                f"(increase(pingpong_jitter_episodes_total{{{_GROUP}}}[1h])) > 0"
            },
            stack=True,
        ),
        graph(
            "Ready to run, and no core",
            "Part of the time, of the busiest thread; and CPU pressure of its quota.",
            "percentunit",
            {
                "{{worker}}": now("worker_runnable_wait_ratio"),
                "{{worker}} throttled": now("worker_cpu_throttled_ratio"),
            },
        ),
        graph(
            "Garbage collection",
            "Part of the time.",
            "percentunit",
            {"{{worker}} {{process}}": rate("gc_pause_seconds_total", "worker, process", _GROUP)},
        ),
    ],
    "Engines": [
        graph("Tokens written", "A second.", "none", {"{{worker}}": rate("generation_tokens_total", "worker", _GROUP)}),
        graph(
            "Prompt tokens",
            "A second, of agents that finished.",
            "none",
            {
                "{{worker}} all": rate("prompt_tokens_total", "worker", _GROUP),
                "{{worker}} cached": rate("prompt_tokens_cached_total", "worker", _GROUP),
                "{{worker}} read ahead": rate("prompt_tokens_read_ahead_total", "worker", _GROUP),
            },
        ),
        graph(
            "KV cache in use",
            "And what is set aside for the full lengths of open hops.",
            "percentunit",
            {
                "{{worker}}": now("kv_cache_usage_ratio"),
                "{{worker}} set aside": f"{now('kv_cache_held_tokens')} / {now('kv_cache_size_tokens')}",
            },
        ),
        graph("Hops", "That run.", "none", {"{{worker}}": now("hops_running")}),
        graph(
            "Hops lost and moved, workers replaced",
            "In five minutes.",
            "none",
            {
                "{{worker}} lost": f"increase({now('hops_lost_total')}[5m])",
                "{{worker}} moved": f"increase({now('hops_moved_total')}[5m])",
                "{{worker}} replaced": f"increase({now('worker_restarts_total')}[5m])",
            },
        ),
        graph(
            "Token logs in use",
            "Of the slab's slots: an agent of a running chain holds one.",
            "percentunit",
            {"{{instance}}": f"pingpong_slots_in_use{{{_HERE}}} / pingpong_slots{{{_HERE}}}"},
        ),
    ],
    "Guesses, texts and steps": [
        graph(
            "Tokens a step",
            "Of agents whose tokens may be guessed; 1 where no guess is right.",
            "none",
            {
                "{{worker}}": f"1 + {rate('spec_decode_accepted_tokens_total', 'worker', _GROUP)}"
                f" / {rate('spec_decode_steps_total', 'worker', _GROUP)}"
            },
        ),
        graph(
            "Guesses that were right",
            "Of all guessed tokens; the others were computed in vain.",
            "percentunit",
            {
                "{{worker}}": f"{rate('spec_decode_accepted_tokens_total', 'worker', _GROUP)}"
                f" / {rate('spec_decode_draft_tokens_total', 'worker', _GROUP)}"
            },
        ),
        graph(
            "Joined texts: ids taken back",
            "A second: computed ahead of a text's end, and otherwise when it was there.",
            "none",
            {"{{worker}}": rate("seam_taken_back_tokens_total", "worker", _GROUP)},
        ),
        graph(
            "Steps between agents",
            "A second, by kind and how they ended.",
            "none",
            {"{{kind}} {{state}}": rate("chain_steps_total", "kind, state")},
            stack=True,
        ),
        graph(
            "What steps take",
            "Once their turn has come.",
            "s",
            {
                f"p{share:.0f} {{{{kind}}}}": quantile(share / 100, "chain_step_time_seconds", "kind")
                for share in (50, 95)
            },
        ),
        graph(
            "Kept beginnings of prompts",
            "At most, as part of the KV cache.",
            "percentunit",
            {"{{worker}}": f"{now('kept_prefix_size_tokens')} / {now('kv_cache_size_tokens')}"},
        ),
    ],
    "GPUs": [
        graph("SM clock", "", "hertz", {"{{worker}} {{gpu}}": now("gpu_sm_clock_hertz")}),
        graph("Temperature", "", "celsius", {"{{worker}} {{gpu}}": now("gpu_temperature_celsius")}),
        graph("Power", "", "watt", {"{{worker}} {{gpu}}": now("gpu_power_watts")}),
        graph(
            "Clocks reduced",
            "By reason, 1 while it is in force.",
            "none",
            {"{{worker}} {{reason}}": now("gpu_throttled")},
            stack=True,
        ),
        graph(
            "Memory",
            "Of the device.",
            "percentunit",
            {"{{worker}} {{gpu}}": f"{now('gpu_memory_used_bytes')} / {now('gpu_memory_size_bytes')}"},
        ),
        graph(
            "Processes of others",
            "On a device that an engine wants for itself.",
            "none",
            {"{{worker}} {{gpu}}": now("gpu_foreign_processes")},
        ),
    ],
    "Daemon": [
        graph(
            "Bus lag",
            "Mean time from a token's commit to its doorbell at a reader.",
            "s",
            {
                "{{worker}}": f"{rate('bus_lag_seconds_sum', 'worker', _GROUP)}"
                f" / {rate('bus_lag_seconds_count', 'worker', _GROUP)}"
            },
        ),
        graph(
            "Doorbells lost or late",
            "A second: tokens that were found by looking.",
            "none",
            {"{{worker}}": rate("bus_repairs_total", "worker", _GROUP)},
        ),
        graph(
            "The daemon itself",
            "CPU in cores, and its memory below.",
            "none",
            {"{{instance}}": f"rate(process_cpu_seconds_total{{{_HERE}}}[{_RATE}])"},
        ),
        graph("Its memory", "", "bytes", {"{{instance}}": f"process_resident_memory_bytes{{{_HERE}}}"}),
        graph(
            "Chain store",
            "On disk.",
            "bytes",
            {"{{instance}}": f"pingpong_store_bytes{{{_HERE}}}"},
        ),
        graph(
            "Frames refused",
            "A second, by socket: garbage, or strangers.",
            "none",
            {"{{socket}}": rate("refused_frames_total", "socket")},
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1}, "panels": []})
        top, left, height = top + 1, 0, 0
        for panel in row:
            size = panel["gridPos"]
            if left + size["w"] > _WIDTH:
                top, left, height = top + height, 0, 0
            panels.append(panel | {"datasource": _SOURCE, "gridPos": {"x": left, "y": top, **size}})
            left, height = left + size["w"], max(height, size["h"])
        top += height
    return {
        "title": "pingpongd",
        "uid": "pingpongd",
        "tags": ["llm", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                _variable("job", "label_values(pingpong_build_info, job)"),
                _variable("instance", 'label_values(pingpong_build_info{job=~"$job"}, instance)'),
                _variable("worker", f"label_values(pingpong_worker_up{{{_HERE}}}, worker)"),
            ]
        },
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "allValue": ".*",
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    """Write it, or compare."""
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text())
        return 0
    if FILE.read_text() == text():
        return 0
    print(f"{FILE.name} is not what {Path(__file__).name} makes: run it.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
