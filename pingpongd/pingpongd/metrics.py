"""What `/metrics` tells: the registry, and all that is counted as it happens. `metrics_state.py` has what is the case.

Names follow Prometheus's conventions, and vLLM's where they mean the same. The event loop writes and threads of the
HTTP server read; the library's counters have a lock each, and nothing else is shared but values that never change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Final, get_args

import prometheus_client
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from pingpong_bus.messages import AgentResult, ChainResult, Heartbeat, JitterCause, StatusReply, StepKind
from pingpong_client.timeline_account import taken_prediction
from pingpongd.metrics_state import StateCollector
from pingpongd.prefill_account import prefill_times
from pingpongd.token_times import TokenTimes

LATENCY_BUCKETS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's for whole requests, in seconds."""
FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""vLLM's for the first token, in seconds."""
RATIO_BUCKETS: Final = (0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 1.0, 1.03, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0)
_CAUSES: Final[tuple[JitterCause, ...]] = get_args(JitterCause)
_KINDS: Final[tuple[StepKind, ...]] = get_args(StepKind)


class Metrics:
    """All metrics of one daemon."""

    def __init__(self) -> None:
        # They would double the series, and say what process_start_time_seconds says.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry(auto_describe=False)
        self._state = StateCollector()
        self._tokens = _TokenTimesCollector()
        for collector in (self._state, self._tokens):
            self._registry.register(collector)
        prometheus_client.ProcessCollector(registry=self._registry)
        prometheus_client.GCCollector(registry=self._registry)
        self._numbers: dict[str, int] = {}
        """Of the process that a group's latest heartbeat came from: its counts began anew."""
        self._written: dict[str, int] = {}
        self._collecting_ms: dict[tuple[str, str], float] = {}
        self._episodes: dict[str, int] = {}

        self._accepted = self._counter("chains_accepted", "Chains that were accepted.")
        self._ended = self._counter("chains_ended", "Chains that have ended.", "state", "placement")
        for state in ("finished", "failed", "cancelled"):
            self._ended.labels(state, "none")
        self._e2e = self._histogram(
            "e2e_chain_latency_seconds", "From a chain's submission to its last token.", LATENCY_BUCKETS, "placement"
        )
        self._queue = self._histogram(
            "chain_queue_time_seconds", "From a chain's submission until it left the queue.", LATENCY_BUCKETS
        )
        self._first = self._histogram(
            "time_to_first_token_seconds",
            "An agent's first token, from the later of its chain's submission (role \"first\") and the last token that "
            'it reads (role "downstream").',
            FIRST_TOKEN_BUCKETS,
            "placement",
            "role",
        )
        self._ratio = self._histogram(
            "chain_prediction_ratio", "What chains took, over what was predicted.", RATIO_BUCKETS, "placement"
        )
        self._hidden = self._counter(
            "prefill_hidden_seconds", "Prefill of agents while those that they read from still wrote.", "placement"
        )
        self._exposed = self._counter(
            "prefill_exposed_seconds",
            "Prefill that was waited for: from when an agent ran and had all to read, to its first token.",
            "placement",
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of the prompts of finished agents.", "worker")
        self._cached = self._counter(
            "prompt_tokens_cached",
            "Of them, those that stood in the prefix cache when the prompt was complete, read-ahead ones included.",
            "worker",
        )
        self._ahead = self._counter(
            "prompt_tokens_read_ahead", "Of them, those that were prefilled before the prompt was complete.", "worker"
        )
        self._generated = self._counter("generation_tokens", "Tokens that were written.", "worker")
        self._draft_steps = self._counter(
            "spec_decode_steps", "Steps that gave tokens of agents whose tokens may be guessed.", "worker"
        )
        self._drafted = self._counter("spec_decode_draft_tokens", "Tokens that were guessed.", "worker")
        self._guessed = self._counter(
            "spec_decode_accepted_tokens", "Of them, those that were right: each saved a step.", "worker"
        )
        self._joined = self._counter(
            "seam_prompts", "Prompts that were joined as text, and tokenized while it came in.", "worker"
        )
        self._rollbacks = self._counter(
            "seam_rollbacks", "Times that ids of such a prompt were computed and turned out otherwise.", "worker"
        )
        self._taken_back = self._counter("seam_taken_back_tokens", "Ids that were computed in vain by that.", "worker")
        self._of_texts = (
            self._draft_steps,
            self._drafted,
            self._guessed,
            self._joined,
            self._rollbacks,
            self._taken_back,
        )
        self._steps = self._counter("chain_steps", "Steps between agents that have ended.", "kind", "state")
        self._step_time = self._histogram(
            "chain_step_time_seconds", "What steps between agents took that have finished.", FIRST_TOKEN_BUCKETS, "kind"
        )
        for kind in ("extract", "call"):
            self._step_time.labels(kind)
            for state in ("finished", "failed", "cancelled"):
                self._steps.labels(kind, state)
        self._lost = self._counter("hops_lost", "Hops that a dying engine took along.", "worker")
        self._moved = self._counter("hops_moved", "Hops that were moved off a degraded group.", "worker")
        self._jitter = self._counter(
            "jitter_episodes", "Times that a group's tokens began to come late, by the first cause.", "worker", "cause"
        )
        self._gc = self._counter("gc_pause_seconds", "What collections of garbage have taken.", "worker", "process")

    # ------------------------------------------------------------------------------------------------ the event loop

    def chain_accepted(self) -> None:
        """A chain was accepted."""
        self._accepted.inc()

    def chain_ended(self, result: ChainResult) -> None:
        """A chain has ended."""
        placement = result.placement or "none"
        self._ended.labels(result.state, placement).inc()
        if result.e2e_ms is not None:
            self._e2e.labels(placement).observe(result.e2e_ms / 1000)
            predicted = taken_prediction(result)
            if result.predicted_ms and not (predicted is not None and predicted.unknown_steps):
                waited_ms = result.started_ms or 0.0  # which no prediction knows of
                self._ratio.labels(placement).observe((result.e2e_ms - waited_ms) / result.predicted_ms)
        if result.started_ms is not None:
            self._queue.observe(result.started_ms / 1000)
        for agent in result.agents:
            if agent.kind != "agent":
                self._step_ended(agent)
                continue
            self._counted(agent)
            for hop in agent.hops:
                if hop.state in ("lost", "moved"):
                    (self._lost if hop.state == "lost" else self._moved).labels(hop.worker).inc()
            if agent.state != "finished" or agent.ttft_ms is None:
                continue
            times = prefill_times(agent)
            role = "downstream" if times.reads else "first"
            self._first.labels(placement, role).observe(max(0.0, agent.ttft_ms) / 1000)
            self._hidden.labels(placement).inc(times.hidden_ms / 1000)
            self._exposed.labels(placement).inc(times.exposed_ms / 1000)
            self._prompt.labels(agent.worker).inc(agent.prompt_tokens)
            self._cached.labels(agent.worker).inc(min(agent.cached_tokens, agent.prompt_tokens))
            self._ahead.labels(agent.worker).inc(times.ahead_tokens)

    def _step_ended(self, step: AgentResult) -> None:
        """Count a step between agents; of one that never began there is nothing to say."""
        if not step.hops:
            return
        self._steps.labels(step.kind, step.state).inc()
        last = step.hops[-1]
        if step.state == "finished" and last.opened_ms is not None and last.ended_ms is not None:
            self._step_time.labels(step.kind).observe(max(0.0, last.ended_ms - last.opened_ms) / 1000)

    def _counted(self, agent: AgentResult) -> None:
        """Count an agent's guesses, and its ids that were taken back."""
        if (drafts := agent.drafts) is not None:
            self._draft_steps.labels(agent.worker).inc(drafts.steps)
            self._drafted.labels(agent.worker).inc(drafts.drafted)
            self._guessed.labels(agent.worker).inc(drafts.accepted)
        if (seam := agent.seam) is not None:
            self._joined.labels(agent.worker).inc()
            self._rollbacks.labels(agent.worker).inc(seam.rollbacks)
            self._taken_back.labels(agent.worker).inc(seam.tokens)

    def beat(self, worker: str, number: int, message: Heartbeat) -> None:
        """Take a heartbeat.

        Args:
            worker: the group's name.
            number: of its start; with each the counts in the message begin anew.
            message: what it says.
        """
        if self._numbers.get(worker) != number:
            self._numbers[worker] = number
            self._written[worker] = 0
            self._collecting_ms[worker, "worker"] = self._collecting_ms[worker, "engine"] = 0.0
        self._generated.labels(worker).inc(max(0, message.output_tokens - self._written[worker]))
        self._written[worker] = message.output_tokens
        collecting = {"worker": message.gc_ms, "engine": message.scheduler.gc_ms if message.scheduler else 0.0}
        for process, ms in collecting.items():
            self._gc.labels(worker, process).inc(max(0.0, ms - self._collecting_ms[worker, process]) / 1000)
            self._collecting_ms[worker, process] = max(ms, self._collecting_ms[worker, process])
        self._tokens.add(worker, message)
        self._state.beat(worker, message)

    def tick(self, status: StatusReply, untraced: int | None) -> None:
        """How things stand, once a second; with the number of chains whose spans were dropped, where spans are sent."""
        for worker in status.workers:
            name, health = worker.name, worker.health
            if name not in self._episodes:
                self._episodes[name] = 0
                for cause in _CAUSES:
                    self._jitter.labels(name, cause)  # so that the first episode is seen as a change, from 0
                for counter in (self._lost, self._moved, self._generated, self._prompt, *self._of_texts):
                    counter.labels(name)
            fresh = health.episodes - self._episodes[name]
            if fresh > 0:
                self._jitter.labels(name, health.cause or "unknown").inc(fresh)
            self._episodes[name] = max(self._episodes[name], health.episodes)
        self._state.tick(status, time.monotonic(), untraced)

    # --------------------------------------------------------------------------------------------------- in a thread

    def render(self, accept: str) -> tuple[str, bytes]:
        """The page: its content type, by what the request accepts, and its text."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _counter(self, name: str, text: str, *labels: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, text, labels, namespace="pingpong", registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            name, text, labels, namespace="pingpong", buckets=buckets, registry=self._registry
        )


class _TokenTimesCollector(Collector):
    """Time between tokens, by worker and by what the engine did meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[tuple[str, StepKind], TokenTimes] = {}

    def add(self, worker: str, message: Heartbeat) -> None:
        with self._lock:
            for kind in _KINDS:
                self._times.setdefault((worker, kind), TokenTimes())
            for counts in message.step_counts:
                self._times[worker, counts.kind].add(counts.buckets, counts.total_ms)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "pingpong_inter_token_latency_seconds",
            "Time from one token of an answer to the next, by what else the engine had to compute meanwhile: nothing, "
            "appends, or a prompt.",
            labels=["worker", "kind"],
        )
        with self._lock:
            for (worker, kind), times in self._times.items():
                buckets, total_s = times.cumulative()
                family.add_metric([worker, kind], buckets=buckets, sum_value=total_s)
        yield family
