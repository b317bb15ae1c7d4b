"""Spans on their way: what an exporter gets, what an OTLP receiver reads, and what becomes of those nobody takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from otlp_receiver import Receiver
from pingpongd.config import DaemonConfig, parse_config
from pingpongd.monitoring import traces_endpoint
from pingpongd.trace_spans import SpanPlan, TracedChain, spans_of
from pingpongd.traces import Traces, otlp_exporter, traces_url
from traced_chain import at, changed, traced

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sent(*chains: object, exporter: InMemorySpanExporter | None = None) -> tuple[ReadableSpan, ...]:
    exporter = exporter or InMemorySpanExporter()
    traces = Traces(exporter, instance="i", version="1")
    traces.start()
    for chain in chains:
        traces.chain_ended(chain)  # type: ignore[arg-type]
    traces.stop()
    assert traces.dropped == 0
    return exporter.get_finished_spans()


def test_spans_are_those_that_were_planned() -> None:
    spans = {span.name: span for span in sent(traced())}
    chain, editor, adviser = (
        spans[it] for it in ("invoke_workflow tips", "invoke_agent editor", "invoke_agent adviser")
    )
    assert chain.parent is None
    assert (chain.start_time, chain.end_time) == (at(0), at(400))
    assert editor.parent is not None
    assert editor.parent.span_id == chain.context.span_id
    assert [link.context.span_id for link in editor.links] == [adviser.context.span_id]
    assert {span.context.trace_id for span in spans.values()} == {chain.context.trace_id}
    assert chain.attributes is not None
    assert chain.attributes["pingpong.chain.id"] == "c1"
    assert chain.resource.attributes["service.name"] == "pingpongd"
    assert chain.status.status_code is StatusCode.UNSET
    assert spans["chat m"].events[0].name == "first_token"


def test_a_failed_chain_has_the_status_of_an_error() -> None:
    chain = next(span for span in sent(changed(state="failed")) if span.parent is None)
    assert chain.status.status_code is StatusCode.ERROR
    assert chain.attributes is not None
    assert chain.attributes["error.type"] == "chain_failed"


def test_a_chain_belongs_to_the_trace_that_it_was_submitted_from() -> None:
    chain = next(span for span in sent(traced(traceparent=PARENT)) if span.name == "invoke_workflow tips")
    assert chain.parent is not None
    assert format(chain.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(chain.parent.span_id, "016x") == PARENT.split("-")[2]


@pytest.mark.parametrize("given", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_a_context_that_makes_no_sense_begins_a_trace_of_its_own(given: str) -> None:
    chain = next(span for span in sent(traced(traceparent=given)) if span.name == "invoke_workflow tips")
    assert chain.parent is None


def test_a_caller_that_is_not_sampled_is_followed() -> None:
    assert sent(traced(traceparent=PARENT[:-2] + "00")) == ()


class Refusing(SpanExporter):
    """Fails in one way or the other."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked = 0
        self._error = error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked += 1
        if self._error is not None:
            raise self._error
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("error", [None, ValueError("boom")])
def test_chains_that_nobody_takes_are_counted_and_told(
    error: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = Refusing(error)
    traces = Traces(exporter, instance="i", version="1")
    traces.start()
    traces.chain_ended(traced())
    traces.chain_ended(traced())
    wait_for(lambda: traces.dropped == 2)
    traces.stop()
    assert exporter.asked == 2
    assert "traces_dropped" in "".join(capsys.readouterr())


def test_a_chain_that_makes_no_spans_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty(chain: TracedChain) -> list[SpanPlan]:
        if chain.model == "faulty":
            raise IndexError("a fault of ours")
        return spans_of(chain)

    monkeypatch.setattr("pingpongd.traces.spans_of", faulty)
    exporter = InMemorySpanExporter()
    found = Traces(exporter, instance="i", version="1")
    found.start()
    found.chain_ended(traced(model="faulty"))
    found.chain_ended(traced())
    found.stop()
    assert found.dropped == 1
    assert "IndexError" in "".join(capsys.readouterr())
    assert "invoke_workflow tips" in [span.name for span in exporter.get_finished_spans()]


class Hanging(SpanExporter):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.go.wait(60)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.go.set()


def test_a_collector_that_hangs_holds_nobody_up_and_memory_has_a_limit() -> None:
    exporter = Hanging()
    traces = Traces(exporter, instance="i", version="1")
    traces.start()
    traces.chain_ended(traced())
    assert exporter.entered.wait(30)
    one = traced()
    longest = 0.0
    for _ in range(300):
        began = time.perf_counter()
        traces.chain_ended(one)
        longest = max(longest, time.perf_counter() - began)
    assert traces.dropped == 300 - 256
    assert one.result.agents[0].text not in [it.result.agents[0].text for it in traces._waiting.queue if it]
    assert longest < 1.0
    began = time.monotonic()
    traces.stop()
    assert time.monotonic() - began < 20
    assert traces.dropped == 300  # those that still waited, too; the one on its way arrived


def test_what_is_never_started_leaves_no_thread() -> None:
    """As where another has the port: the daemon says so and ends."""
    before = set(threading.enumerate())
    Traces(InMemorySpanExporter(), instance="i", version="1").stop()
    assert not set(threading.enumerate()) - before


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def test_an_otlp_receiver_reads_what_was_sent(receiver: Receiver) -> None:
    traces = Traces(otlp_exporter(receiver.endpoint), instance="i", version="1")
    traces.start()
    traces.chain_ended(traced())
    wait_for(lambda: bool(receiver.requests))
    traces.stop()
    assert traces.dropped == 0
    ((path, request),) = receiver.requests
    assert path == "/v1/traces"
    (of_resource,) = request.resource_spans
    resource = {it.key: it.value.string_value for it in of_resource.resource.attributes}
    assert resource["service.name"] == "pingpongd"
    (of_scope,) = of_resource.scope_spans
    assert of_scope.schema_url == "https://opentelemetry.io/schemas/1.41.0"
    spans = {span.name: span for span in of_scope.spans}
    assert spans["invoke_workflow tips"].start_time_unix_nano == at(0)
    assert spans["invoke_agent editor"].parent_span_id == spans["invoke_workflow tips"].span_id
    assert spans["invoke_agent editor"].links[0].span_id == spans["invoke_agent adviser"].span_id


def test_a_receiver_that_is_gone_is_given_up_and_the_end_waits_for_seconds_only() -> None:
    traces = Traces(otlp_exporter("http://127.0.0.1:9"), instance="i", version="1")
    traces.start()
    traces.chain_ended(traced())
    began = time.monotonic()
    traces.stop()
    assert time.monotonic() - began < 20
    assert traces.dropped == 1


def config(endpoint: str | None = None) -> DaemonConfig:
    document = {"engine": "simulated", "groups": [{"name": "a", "devices": ["cpu:0"]}]}
    return parse_config(document | ({"traces": {"endpoint": endpoint}} if endpoint else {}))


def test_where_spans_go() -> None:
    assert traces_endpoint(config(), {}) is None
    named = traces_endpoint(config("http://one:4318"), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two:4318"})
    assert named is not None
    assert (named.host, named.configured) == ("one", "http://one:4318")
    by_environment = traces_endpoint(config(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two:4318"})
    assert by_environment is not None
    assert (by_environment.host, by_environment.configured) == ("two", None)
    assert traces_endpoint(config("http://one:4318"), {"OTEL_SDK_DISABLED": "true"}) is None
    broken = traces_endpoint(config(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1:4318"})
    assert broken is not None
    assert broken.host == ""


def test_a_path_is_added_only_where_there_is_none() -> None:
    assert traces_url("http://one:4318") == "http://one:4318/v1/traces"
    assert traces_url("http://one:4318/") == "http://one:4318/v1/traces"
    assert traces_url("https://one/otlp/v1/traces") == "https://one/otlp/v1/traces"
