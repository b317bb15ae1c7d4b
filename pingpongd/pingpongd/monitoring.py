"""What others see of a running daemon: metrics and health over HTTP, and spans of its chains.

The event loop tells it what happens, and waits for nothing. What is not configured is not imported: a daemon without
`[http]` and `[traces]` needs neither library.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

import msgspec
import structlog

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import ChainResult, Heartbeat, StatusReply
from pingpongd.config import DaemonConfig
from pingpongd.health import GroupPulse, Health, Pulse, judge
from pingpongd.http_server import HttpServer, Reply
from pingpongd.stored import Job
from pingpongd.trace_spans import TracedChain

if TYPE_CHECKING:
    from pingpongd.metrics import Metrics
    from pingpongd.traces import Traces

_log = structlog.get_logger()
NO_METRICS: Final = ConfigError(
    "it takes the Python package prometheus-client, which is not installed.",
    field="http.listen",
    hint="Run `pip install 'pingpongd[metrics]'`, or take the key out.",
)
NO_TRACES: Final = ConfigError(
    "it takes OpenTelemetry's SDK and its OTLP/HTTP exporter, which are not installed.",
    field="traces.endpoint",
    hint="Run `pip install 'pingpongd[traces]'`.",
)
TRACE_MODULES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class ChainObserver(Protocol):
    """Who hears of chains' beginnings and ends; may neither wait nor fail."""

    def chain_accepted(self) -> None:
        """A chain was accepted."""

    def chain_ended(self, job: Job, reads: Sequence[Sequence[int]], result: ChainResult) -> None:
        """A chain has ended; `reads` has the agents that each agent reads from."""


class Monitoring:
    """Everything that is configured of it; a `ChainObserver`."""

    def __init__(self, config: DaemonConfig) -> None:
        """Bind the port, and look whether there is all that the configuration needs.

        Raises:
            ConfigError: a library is missing, or the address cannot be had.
        """
        self._texts = config.log_prompts
        self._pulse = Pulse("starting")
        self._ticked_at = time.monotonic()
        self._metrics = _metrics() if config.http.listen is not None else None
        self._traces = _traces(config)
        self._server: HttpServer | None = None
        if config.http.listen is not None:
            pages = {"/metrics": self._metrics_page, "/healthz": self._live_page, "/readyz": self._ready_page}
            self._server = HttpServer(config.http.listen, pages)

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it serves pages."""
        return self._server.address if self._server is not None else None

    def start(self) -> None:
        """Begin to answer."""
        if self._server is not None:
            self._server.start()
            host, port = self._server.address
            _log.info("http_serving", host=host, port=port)
        if self._traces is not None:
            self._traces.start()

    async def stop(self) -> None:
        """Send the spans that wait, for some seconds at most, and give the port back."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.stop)

    def apply(self, config: DaemonConfig) -> None:
        """Take a configuration that was read again: `log_prompts`."""
        self._texts = config.log_prompts

    def tick(self, status: Callable[[], StatusReply], overdue: Callable[[], dict[str, float]]) -> None:
        """The event loop lives; called once a second.

        Args:
            status: makes the daemon's status.
            overdue: says by how many seconds which group should have made a step.
        """
        self._ticked_at = time.monotonic()
        if self._metrics is None:
            return
        found, late = status(), overdue()
        groups = tuple(GroupPulse(it.name, it.state, late.get(it.name, 0.0)) for it in found.workers)
        error = found.store.error if found.store is not None else ""
        self._pulse = Pulse(found.state, groups, _stage(found), error)
        self._metrics.tick(found, self._traces.dropped if self._traces is not None else None)

    def beat(self, worker: str, number: int, message: Heartbeat) -> None:
        """A worker's heartbeat; `number` is of its start."""
        if self._metrics is not None:
            self._metrics.beat(worker, number, message)

    def chain_accepted(self) -> None:
        """See `ChainObserver`."""
        if self._metrics is not None:
            self._metrics.chain_accepted()

    def chain_ended(self, job: Job, reads: Sequence[Sequence[int]], result: ChainResult) -> None:
        """See `ChainObserver`."""
        if self._metrics is not None:
            self._metrics.chain_ended(result)
        if self._traces is not None:
            self._traces.chain_ended(
                TracedChain(
                    chain=job.chain,
                    result=result,
                    reads=reads,
                    model=job.model,
                    submitted_ns=int(job.submitted_at * 1e9),
                    ended_ns=time.time_ns(),
                    traceparent=job.options.traceparent,
                    texts=self._texts,
                )
            )

    # --------------------------------------------------------------------------------------------------- in a thread

    def health(self) -> Health:
        """How the daemon is, judged now; may be called by any thread."""
        return judge(self._pulse, time.monotonic() - self._ticked_at)

    def _metrics_page(self, accept: str) -> Reply:
        assert self._metrics is not None  # noqa: S101 - pages are served only with metrics
        content_type, body = self._metrics.render(accept)
        return Reply(HTTPStatus.OK, content_type, body)

    def _live_page(self, accept: str) -> Reply:  # noqa: ARG002 - it has one form
        health = self.health()
        return _health_page(health, fine=health.live)

    def _ready_page(self, accept: str) -> Reply:  # noqa: ARG002 - it has one form
        health = self.health()
        return _health_page(health, fine=health.ready)


def _stage(status: StatusReply) -> str:
    """What a daemon that starts is at."""
    if status.progress is not None:
        return status.progress.stage
    return ", ".join(f"{it.name}: {it.stage}" for it in status.workers if it.state != "ready")


def _health_page(health: Health, *, fine: bool) -> Reply:
    status = HTTPStatus.OK if fine else HTTPStatus.SERVICE_UNAVAILABLE
    return Reply(status, "application/json", msgspec.json.encode(health) + b"\n")


def _metrics() -> Metrics:
    try:
        from pingpongd.metrics import Metrics
    except ModuleNotFoundError:
        raise NO_METRICS from None
    return Metrics()


class TracesEndpoint(msgspec.Struct, frozen=True):
    """Where spans go."""

    host: str
    configured: str | None
    """The configuration's address; None where it comes from the environment."""
    variable: str = ""
    """Of the environment."""


def _http_host(address: str) -> str | None:
    """The host of an HTTP address; None: it is none."""
    try:
        parts = urlsplit(address)
        return parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:  # of the port, or of brackets
        return None


def traces_endpoint(config: DaemonConfig, environ: Mapping[str, str]) -> TracesEndpoint | None:
    """Where spans are to go: what the configuration says, else the environment; None: nowhere.

    Raises:
        ConfigError: the configuration names no HTTP address.
    """
    endpoint = config.traces.endpoint
    host = _http_host(endpoint) if endpoint is not None else None
    if endpoint is not None and not host:
        raise ConfigError(
            f'"{endpoint}" is no http or https address.',
            field="traces.endpoint",
            hint="Name an OTLP/HTTP endpoint, such as http://127.0.0.1:4318.",
        )
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is not None:
        return TracesEndpoint(host or "", endpoint)
    for variable in _ENDPOINT_VARIABLES:
        if environ.get(variable):
            return TracesEndpoint(_http_host(environ[variable]) or "", None, variable)
    return None


def talks_beyond(config: DaemonConfig) -> bool:
    """Whether the configuration has other hosts ask for metrics, or be sent spans."""
    listen, endpoint = config.http.listen, traces_endpoint(config, {})
    hosts = [listen.rpartition(":")[0].strip("[]")] if listen is not None else []
    if endpoint is not None:
        hosts.append(endpoint.host)
    return any(not is_loopback(host) for host in hosts)


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this one alone; names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _traces(config: DaemonConfig) -> Traces | None:
    endpoint = traces_endpoint(config, os.environ)
    if endpoint is None:
        return None
    try:
        from pingpongd.traces import Traces, otlp_exporter

        exporter = otlp_exporter(endpoint.configured)
    except ModuleNotFoundError:
        if endpoint.configured is not None:
            raise NO_TRACES from None
        _log.warning("traces_off", reason=NO_TRACES.hint)  # the variable may have been meant for others
        return None
    _log.info("traces_on", host=endpoint.host)
    return Traces(exporter, instance=config.instance, version=version("pingpongd"))
