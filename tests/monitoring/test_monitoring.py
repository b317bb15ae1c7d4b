"""What is served of a daemon whose event loop this test is: while it ticks, and while it hangs."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from metrics_page import beat, status, worker
from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import Progress
from pingpongd import health
from pingpongd.check_finding import Finding
from pingpongd.check_monitoring import monitoring_findings
from pingpongd.config import DaemonConfig, parse_config
from pingpongd.monitoring import Monitoring, talks_beyond


def config(**given: Any) -> DaemonConfig:
    return parse_config({"engine": "simulated", "groups": [{"name": "a", "devices": ["cpu:0"]}]} | given)


@pytest.fixture
async def monitoring() -> AsyncIterator[Monitoring]:
    found = Monitoring(config(http={"listen": "127.0.0.1:0"}))
    found.start()
    yield found
    await found.stop()


def ask(monitoring: Monitoring, path: str) -> tuple[int, bytes]:
    assert monitoring.address is not None
    connection = http.client.HTTPConnection(*monitoring.address, timeout=30)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


async def answers(monitoring: Monitoring, path: str) -> tuple[int, dict[str, Any]]:
    code, body = await asyncio.to_thread(ask, monitoring, path)
    return code, json.loads(body)


def tick(monitoring: Monitoring, **given: Any) -> None:
    monitoring.tick(lambda: status(worker(), **given), dict)


async def test_a_daemon_that_starts_lives_and_is_not_ready(monitoring: Monitoring) -> None:
    assert (await answers(monitoring, "/healthz"))[0] == 200
    tick(monitoring, state="starting", progress=Progress(stage="fetching the model"))
    code, found = await answers(monitoring, "/readyz")
    assert code == 503
    assert found["reasons"] == ["It starts: fetching the model."]
    loading = [worker(), worker("b", state="loading", stage="loading the weights")]
    monitoring.tick(lambda: status(*loading, state="starting"), dict)
    assert (await answers(monitoring, "/readyz"))[1]["reasons"] == ["It starts: b: loading the weights."]
    tick(monitoring)
    assert (await answers(monitoring, "/readyz"))[0] == 200


async def test_while_the_event_loop_hangs_it_says_so_and_then_that_it_is_over(
    monitoring: Monitoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick(monitoring)
    assert (await answers(monitoring, "/healthz"))[0] == 200
    monkeypatch.setattr(health, "LOOP_LATE_S", 0.5)
    seen: list[tuple[int, bytes]] = []
    told = threading.Event()

    def watch() -> None:
        """In a thread, as a probe is elsewhere: ask until the answer changes."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            seen.append(ask(monitoring, "/healthz"))
            if seen[-1][0] != 200:
                seen.append(ask(monitoring, "/metrics"))
                break
            time.sleep(0.05)
        told.set()

    watching = threading.Thread(target=watch)
    watching.start()
    told.wait(60)  # the loop stands: nothing else runs in this thread until the probe has seen it
    watching.join()
    code, body = seen[-2]
    assert code == 503
    assert b"has not ticked" in body
    assert seen[-1][0] == 200
    tick(monitoring)
    assert (await answers(monitoring, "/healthz"))[0] == 200


async def test_metrics_are_served_while_the_daemon_counts(monitoring: Monitoring) -> None:
    stop = threading.Event()
    pages: list[bytes] = []

    def scrape() -> None:
        while not stop.is_set():
            code, body = ask(monitoring, "/metrics")
            assert code == 200
            pages.append(body)

    scraping = threading.Thread(target=scrape)
    scraping.start()
    while len(pages) < 5:
        for name in ("a", "b", "c"):
            monitoring.beat(name, 1, beat(output_tokens=len(pages)))
        tick(monitoring)
        monitoring.chain_accepted()
        await asyncio.sleep(0)
    stop.set()
    scraping.join()
    assert b"pingpong_chains_accepted_total" in pages[-1]


async def test_what_is_not_configured_is_not_there() -> None:
    found = Monitoring(config())
    assert found.address is None
    found.start()
    tick(found)
    found.beat("a", 1, beat())
    found.chain_accepted()
    await found.stop()


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As on a machine where it is not installed."""
    for name in list(sys.modules):
        if name == package or name.startswith((f"{package}.", "pingpongd.metrics", "pingpongd.traces")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "prometheus_client")
    with pytest.raises(ConfigError, match=r"pingpongd\[metrics\]") as caught:
        Monitoring(config(http={"listen": "127.0.0.1:0"}))
    assert caught.value.field == "http.listen"


def test_missing_traces_are_an_error_where_configured_and_a_warning_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "opentelemetry")
    with pytest.raises(ConfigError, match=r"pingpongd\[traces\]") as caught:
        Monitoring(config(traces={"endpoint": "http://127.0.0.1:4318"}))
    assert caught.value.field == "traces.endpoint"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    Monitoring(config())
    assert "traces_off" in "".join(capsys.readouterr())


@pytest.mark.parametrize("endpoint", ["localhost:4318", "http://127.0.0.1:4318x", "http://[::1:4318"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Monitoring(config(traces={"endpoint": endpoint}))
    assert caught.value.field == "traces.endpoint"


def findings(environ: dict[str, str] | None = None, **given: Any) -> list[Finding]:
    return list(monitoring_findings(config(**given), environ or {}))


def test_what_check_says() -> None:
    assert findings() == []
    local, public = findings(http={"listen": "127.0.0.1:9464"}), findings(http={"listen": "0.0.0.0:9464"})
    assert [it.level for it in (*local, *public)] == ["ok", "warning"]
    (sent,) = findings(traces={"endpoint": "http://user:secret@collector:4318"})
    assert (sent.level, "collector" in sent.text, "secret" in sent.text) == ("ok", True, False)
    (wrong,) = findings(traces={"endpoint": "collector:4318"})
    assert wrong.level == "error"


@pytest.mark.parametrize("listen", ["192.0.2.1:9464", "no.such.host.invalid:9464", "127.0.0.1:70000"])
def test_check_knows_addresses_that_a_start_would_end_at(listen: str) -> None:
    (found,) = findings(http={"listen": listen})
    assert (found.level, listen in found.text) == ("error", True)


def test_check_does_not_mind_a_port_that_is_in_use() -> None:
    """By the daemon, as likely as not."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        (found,) = findings(http={"listen": f"127.0.0.1:{other.getsockname()[1]}"})
    assert found.level == "ok"


def test_what_check_says_of_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("prometheus_client", "opentelemetry"):
        for name in [it for it in sys.modules if it == package or it.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    found = findings(http={"listen": "127.0.0.1:9464"}, traces={"endpoint": "http://collector:4318"})
    assert [it.level for it in found] == ["error", "error"]
    assert [it.level for it in findings(environ)] == ["warning"]


@pytest.mark.parametrize(
    ("given", "beyond"),
    [
        ({}, False),
        ({"http": {"listen": "127.0.0.1:9464"}}, False),
        ({"http": {"listen": "[::1]:9464"}}, False),
        ({"http": {"listen": "localhost:9464"}, "traces": {"endpoint": "http://127.0.0.2:4318"}}, False),
        ({"http": {"listen": "0.0.0.0:9464"}}, True),
        ({"http": {"listen": "[::]:9464"}}, True),
        ({"traces": {"endpoint": "https://collector.example:4318"}}, True),
    ],
)
def test_whether_other_hosts_have_to_be_reached(given: dict[str, Any], beyond: bool) -> None:
    assert talks_beyond(config(**given)) is beyond
