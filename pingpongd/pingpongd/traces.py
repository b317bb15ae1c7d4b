"""Sends chains' spans to an OpenTelemetry collector, when they have ended; never waited for.

A thread of its own makes the spans and sends them, a request for each chain. The event loop only puts a finished
chain into a queue, which has an end: where the collector does not answer, chains are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pingpongd.trace_spans import SCHEMA_URL, SpanPlan, TracedChain, spans_of, without_unneeded

_log = structlog.get_logger()
_MOST_WAITING: Final = 256
"""Chains."""
_SPANS_A_REQUEST: Final = 512
_TIMEOUT_S: Final = 5.0
"""Of one request, with its repetitions."""
_STOP_SECONDS: Final = 3.0
_LAST_SECONDS: Final = 0.5
"""For the chain that is on its way when the others are given up."""


class Traces:
    """Takes chains that have ended."""

    def __init__(self, exporter: SpanExporter, *, instance: str, version: str) -> None:
        """Args:
        exporter: where spans go.
        instance: the daemon's name.
        version: the daemon's.
        """
        self.dropped = 0
        """Chains whose spans nobody has."""
        self._exporter = exporter
        self._made = _Made()
        given = {"service.version": version, "service.instance.id": f"{instance}.{os.getpid()}"}
        if not os.environ.get("OTEL_SERVICE_NAME") and "service.name" not in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            given["service.name"] = "pingpongd"
        provider = TracerProvider(resource=Resource.create(given), shutdown_on_exit=False)
        provider.add_span_processor(self._made)
        self._tracer = provider.get_tracer("pingpongd", version, SCHEMA_URL)
        self._waiting: queue.Queue[TracedChain | None] = queue.Queue(_MOST_WAITING)
        _quiet()
        self._lock = threading.Lock()
        """Of `dropped`."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def chain_ended(self, traced: TracedChain) -> None:
        """Have a chain's spans sent; returns at once."""
        try:
            self._waiting.put_nowait(without_unneeded(traced))
        except queue.Full:
            self._drop("too many chains wait to be sent")

    def stop(self) -> None:
        """Send what waits, for some seconds at most; called in a thread."""
        deadline = time.monotonic() + _STOP_SECONDS
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_STOP_SECONDS)
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        left = self._give_up() if self._thread.is_alive() else 0
        self._exporter.shutdown()  # ends a wait between two tries
        if self._thread.is_alive():
            self._thread.join(_LAST_SECONDS)
            left += self._thread.is_alive()
        if left:
            self._drop("the daemon ends", left)

    def _give_up(self) -> int:
        """Take out the chains that wait, and have the thread end; returns how many they were."""
        left = 0
        with suppress(queue.Empty):
            while True:
                left += self._waiting.get_nowait() is not None
        self._waiting.put_nowait(None)
        return left

    def _run(self) -> None:
        while (traced := self._waiting.get()) is not None:
            try:
                why = self._send(traced)
            except Exception as error:  # noqa: BLE001 - the next chain may do better
                self._made.take()
                why = f"{type(error).__name__} while they were made or sent"
            if why:
                self._drop(why)

    def _send(self, traced: TracedChain) -> str:
        """Make a chain's spans and send them; returns why they did not arrive, empty where they did."""
        plans = spans_of(traced)
        for plan, span in zip(plans, self._start(traced, plans), strict=True):
            _finish(plan, span)
        spans = self._made.take()
        for start in range(0, len(spans), _SPANS_A_REQUEST):
            if self._exporter.export(spans[start : start + _SPANS_A_REQUEST]) is not SpanExportResult.SUCCESS:
                return "the collector does not answer, or refuses them"
        return ""

    def _start(self, traced: TracedChain, plans: list[SpanPlan]) -> list[Span]:
        carrier = {"traceparent": traced.traceparent} if traced.traceparent else {}
        outside = TraceContextTextMapPropagator().extract(carrier)
        spans: list[Span] = []
        for plan in plans:
            spans.append(
                self._tracer.start_span(
                    plan.name,
                    context=outside if plan.parent is None else set_span_in_context(spans[plan.parent]),
                    kind=SpanKind.INTERNAL,
                    attributes=plan.attributes,
                    links=[Link(spans[at].get_span_context(), {"pingpong.link": "reads"}) for at in plan.links],
                    start_time=plan.start_ns,
                )
            )
        return spans

    def _drop(self, why: str, chains: int = 1) -> None:
        with self._lock:
            self.dropped += chains
        _log.warning("traces_dropped", reason=why, dropped=self.dropped)


class _Made(SpanProcessor):
    """Keeps the spans that have ended until they are taken; used by one thread."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


def _finish(plan: SpanPlan, span: Span) -> None:
    for event in plan.events:
        span.add_event(event.name, timestamp=event.at_ns)
    if plan.error:
        span.set_attribute("error.type", plan.error)
        span.set_status(Status(StatusCode.ERROR, plan.error_text or None))
    span.end(end_time=max(plan.start_ns, plan.end_ns))


def otlp_exporter(endpoint: str | None) -> SpanExporter:
    """Sends to an OTLP/HTTP endpoint; None: to the one that the environment names, with its headers."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=traces_url(endpoint) if endpoint else None, timeout=_TIMEOUT_S)


def traces_url(endpoint: str) -> str:
    """Where traces go at an endpoint: /v1/traces, unless a path is given."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.rstrip("/") else parts._replace(path="/v1/traces").geturl()


def _quiet() -> None:
    """The exporter logs each failure with Python's logging, to a standard error that holds JSON; we say it."""
    logger: Any = logging.getLogger("opentelemetry")
    logger.setLevel(logging.CRITICAL)
    logger.propagate = False
