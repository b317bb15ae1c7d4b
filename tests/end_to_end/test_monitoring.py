"""A real daemon as monitoring sees it: its health when workers die, its spans, and a real Prometheus on its metrics."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from daemon_process import HANG_SECONDS, DaemonProcess, StartDaemon, simulated_config, until
from otlp_receiver import Receiver
from pingpong_bus.chain import Agent, Chain, Extract
from pingpong_bus.messages import SubmitOptions
from prometheus_process import Prometheus, free_port

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
CHAIN = Chain(
    name="tips",
    agents=[
        Agent(name="adviser", raw_prompt="say something of some length", max_tokens=60, ignore_eos=True),
        Agent(name="start", input="{{adviser}}", extract=Extract(regex="(?s).{1,20}"), max_chars=20),
        Agent(
            name="editor",
            raw_prompt="a text that goes before: {{adviser}} and {{start}} behind",
            max_tokens=40,
            ignore_eos=True,
        ),
    ],
)
ABSENT = (
    *("pingpong_gpu_", "pingpong_worker_runnable", "pingpong_worker_cpu", "pingpong_jitter_episodes"),
    *("pingpong_chain_prediction_ratio", 'kind="appends"'),
)
"""What a machine without GPUs, or a probe that the kernel does not answer, leaves out; episodes, predictions of engines
that were not measured, and tokens beside appends, of which there were none."""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def monitored(port: int, more: str = "", **given: Any) -> str:
    return f'{simulated_config(**given)}\n{more}\n[http]\nlisten = "127.0.0.1:{port}"\n'


def ask(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def answer(port: int, path: str) -> tuple[int, dict[str, Any]]:
    code, body = ask(port, path)
    return code, json.loads(body)


def workers_of(daemon: DaemonProcess) -> list[psutil.Process]:
    return [it for it in psutil.Process(daemon.process.pid).children() if "pingpong_worker" in " ".join(it.cmdline())]


async def test_readiness_is_lost_with_the_last_group_and_comes_back(start_daemon: StartDaemon) -> None:
    port = free_port()
    daemon = await start_daemon(monitored(port, "[restart]\nbackoff_s = 1.0\nbackoff_max_s = 1.0"))
    assert answer(port, "/readyz") == (200, answer(port, "/healthz")[1])
    for worker in workers_of(daemon):
        worker.send_signal(signal.SIGKILL)
    await until(lambda: answer(port, "/readyz")[0] == 503, "that no group serves")
    code, found = answer(port, "/healthz")
    assert (code, found["live"]) == (200, True)  # they are being replaced
    await until(lambda: answer(port, "/readyz")[0] == 200, "that groups serve again")
    page = ask(port, "/metrics")[1].decode()
    assert re.search(r'pingpong_worker_restarts_total\{worker="a"\} 1\.0', page)


async def test_a_daemon_that_is_stopped_is_not_ready_while_chains_finish(start_daemon: StartDaemon) -> None:
    port = free_port()
    daemon = await start_daemon(monitored(port, step_ms=20.0))
    long = Chain(name="long", agents=[Agent(name="one", raw_prompt="a", max_tokens=2000)])
    async with daemon.client() as client:
        chain = await client.submit(long, {}, SubmitOptions())
        daemon.signal(signal.SIGTERM)
        await until(lambda: answer(port, "/readyz")[0] == 503, "that it is not ready")
        assert answer(port, "/healthz")[0] == 200
        await client.cancel(chain)
    assert await daemon.ended() == 0


async def test_a_port_that_another_has_ends_the_daemon_with_a_sentence(start_daemon: StartDaemon) -> None:
    port = free_port()
    await start_daemon(monitored(port))
    second = await start_daemon(monitored(port), wait=False)
    assert await second.ended() == 78
    (failed,) = second.log_events("daemon_failed")
    assert "http.listen" in str(failed["error"])


async def test_spans_of_a_chain_reach_a_collector_in_the_callers_trace(start_daemon: StartDaemon) -> None:
    receiver = Receiver()
    try:
        daemon = await start_daemon(f'{simulated_config()}\n[traces]\nendpoint = "{receiver.endpoint}"\n')
        file = daemon.folder / "chain.json"
        file.write_text(
            json.dumps({"name": "tips", "agents": [{"name": "one", "raw_prompt": "a secret", "max_tokens": 5}]})
        )
        command = [sys.executable, "-m", "pingpong_client", "--socket", str(daemon.socket), "submit", str(file)]
        done = await asyncio.to_thread(
            subprocess.run, [*command, "--traceparent", PARENT], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        await until(lambda: bool(receiver.requests), "the spans")
        await daemon.stop()
    finally:
        receiver.close()
    ((path, request),) = receiver.requests
    assert path == "/v1/traces"
    assert b"a secret" not in request.SerializeToString()
    spans = {span.name: span for it in request.resource_spans for scope in it.scope_spans for span in scope.spans}
    assert {"invoke_workflow tips", "queue", "invoke_agent one", "text_completion simulated"} == set(spans)
    chain = spans["invoke_workflow tips"]
    assert chain.trace_id.hex() == PARENT.split("-")[1]
    assert chain.parent_span_id.hex() == PARENT.split("-")[2]
    assert chain.start_time_unix_nano < spans["invoke_agent one"].end_time_unix_nano == chain.end_time_unix_nano


async def test_prometheus_scrapes_it_and_every_query_and_alert_is_evaluated(
    start_daemon: StartDaemon, folder: Path
) -> None:
    port = free_port()
    prometheus = Prometheus(folder, f"127.0.0.1:{port}", FOLDER / "alerts.yml")
    try:
        daemon = await start_daemon(monitored(port))
        await asyncio.to_thread(prometheus.wait_for, "pingpong_build_info")
        async with daemon.client() as client:
            for ended in (2, 4):  # with a scrape after each, for rates to have something to say
                await client.run(CHAIN, {}, SubmitOptions(mode="serial"))
                await client.run(CHAIN, {}, SubmitOptions(mode="ping-pong"))
                seen = f'sum(pingpong_chains_ended_total{{state="finished"}}) == {ended}'
                await asyncio.to_thread(prometheus.wait_for, seen)
        await asyncio.to_thread(prometheus.wait_for, "sum(pingpong_generation_tokens_total) == 400")
        empty = await asyncio.to_thread(_evaluate, prometheus)
        assert [it for it in empty if not any(name in it for name in ABSENT)] == []
        await asyncio.to_thread(_check_rules, prometheus)
        (e2e,) = await asyncio.to_thread(prometheus.query, "sum(pingpong_e2e_chain_latency_seconds_count)")
        assert e2e["value"][1] == "4"
        await daemon.stop()
        await asyncio.to_thread(prometheus.wait_for, 'ALERTS{alertname="PingpongDown"}')
    finally:
        prometheus.stop()


def _evaluate(prometheus: Prometheus) -> list[str]:
    """Every query of the dashboard, as Grafana would fill it in; returns those that give nothing."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 40
    filled = {"$__rate_interval": "30s", "$job": ".*", "$instance": ".*", "$worker": ".*"}
    empty = []
    for query in queries:
        for name, value in filled.items():
            query = query.replace(name, value)
        assert "$" not in query
        if not prometheus.query(query):
            empty.append(query)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            assert prometheus.ask(f"label/{label}/values", **{"match[]": metric}), variable["name"]
    return empty


def _check_rules(prometheus: Prometheus) -> None:
    """Every alert was evaluated without an error, and none fires of a daemon that is well."""
    (group,) = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == len(re.findall("alert: ", (FOLDER / "alerts.yml").read_text()))
    for rule in group["rules"]:
        assert rule["health"] == "ok", rule
        assert rule.get("lastError", "") == ""
        assert rule["state"] != "firing", rule["name"]  # on a busy machine tokens may well come late
