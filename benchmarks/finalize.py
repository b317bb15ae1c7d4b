"""Where the milliseconds go between an upstream's last token and its downstream's first, stage by stage.

    python benchmarks/finalize.py --config benchmarks/tiny.toml --prefix 4096,12288 --runs 20 --out finalize.jsonl
    python benchmarks/finalize.py --config benchmarks/h200.toml --prefix 4096,12288 --modes ping-pong,overlap
    python benchmarks/finalize.py --report finalize.jsonl

Two agents, the second of which reads the first, run over and over on a daemon that is started with a trace
(`workers/pingpong_worker/request_trace.py`). The medians of the stages do not add up to the median of all exactly.
What a decode step takes is the mean of the second agent's, which then has the devices for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from commands import command
from connecting import add_daemon_arguments, connection, made_with
from figures import percentile
from harness import check_ready, in_order
from pingpong_bus.errors import DataError
from pingpong_bus.messages import ChainResult, Mode, SessionKind, SubmitOptions
from pingpong_client import AsyncClient
from pingpong_worker.request_trace import TRACE, Moment, read_trace
from profiles import Profile, ids_chain
from progress_bar import counted
from runs import append_line, read_lines

MODES: tuple[Mode, ...] = ("ping-pong", "overlap", "serial")
SESSIONS: tuple[SessionKind, ...] = get_args(SessionKind)
STAGES = {
    "bell": "rung",
    "feed": "finalized",
    "submit": "encoding",
    "send": "decoding",
    "decode": "decoded",
    "hash": "hashed",
    "queue": "scheduling",
    "schedule": "executing",
    "hand over": "preparing",
    "add": "added",
    "inputs": "prepared",
    "launch": "launched",
    "sample": "sampled",
    "plan ahead": "planned",
    "compute": "computed",
    "update": "updated",
    "return": "received",
    "commit": "first token",
}
"""What is done, and the moment by which it is done; it begins with the moment before. The first begins with the
upstream's last token."""
_LAST_OUTPUT = 33


class FinalizeRun(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file."""

    mode: Mode
    session: SessionKind | None
    """Of the downstream agent."""
    prefix: int
    output: int
    index: int
    prompt_tokens: int
    final_tokens: int
    """Of them, those that no append had sent."""
    cached_tokens: int
    appends: int
    gave_up: bool
    """Whether an append was in flight when the prompt was complete."""
    ttft_ms: float
    step_ms: float
    stages: dict[str, float]
    """Milliseconds of each of `STAGES`; those that were not seen are part of the next one."""
    provenance: dict[str, Any]

    @property
    def ratio(self) -> float:
        """TTFT over decode step."""
        return self.ttft_ms / self.step_ms


def stage_times(moments: Sequence[Moment], hop: str, upstream: str) -> dict[str, float]:
    """What each stage of a hop took, in ms.

    Args:
        moments: in the order of time.
        hop: of the downstream agent.
        upstream: the hop that it reads.

    Raises:
        DataError: the upstream's end or the hop's first token was not traced.
    """
    ended = [moment.at_ns for moment in moments if (moment.of, moment.stage) == (upstream, "ended")]
    first = [moment.at_ns for moment in moments if (moment.of, moment.stage) == (hop, "first token")]
    if not ended or not first:
        raise DataError(f"the trace of {hop} has no beginning or no end.")
    # The last request of a prefix-cache session decodes; a streaming-input session has one, of the hop's name.
    numbers = [int(number) for name, _, number in (moment.of.rpartition("#") for moment in moments) if name == hop]
    mine = {hop, f"{hop}#{max(numbers, default=0)}"}
    seen: dict[str, int] = {}
    for moment in moments:
        if ended[-1] <= moment.at_ns <= first[0] and (moment.of in mine or moment.stage == "rung"):
            seen.setdefault(moment.stage, moment.at_ns)
    times, at = {}, ended[-1]
    for name, stage in STAGES.items():
        if (until := seen.get(stage)) is not None and until >= at:
            times[name], at = (until - at) / 1e6, until
    return times


def render(runs: Sequence[FinalizeRun]) -> str:
    """Medians of all runs that are alike, as Markdown."""
    lines = [
        f"| mode, session | prefix | runs | gave up | TTFT ms | step ms | ratio | p90 | {' | '.join(STAGES)} |",
        "|---|--:|--:|--:|--:|--:|--:|--:|" + "--:|" * len(STAGES),
    ]
    kinds = dict.fromkeys((run.mode, run.session, run.prefix) for run in runs)
    for mode, session, prefix in kinds:
        alike = [run for run in runs if (run.mode, run.session, run.prefix) == (mode, session, prefix)]
        ratios = [run.ratio for run in alike]
        medians = [
            f"{statistics.median(times):.2f}" if (times := [r.stages[n] for r in alike if n in r.stages]) else ""
            for n in STAGES
        ]
        lines.append(
            f"| {mode}, {session} | {prefix} | {len(alike)} | {sum(run.gave_up for run in alike)} "
            f"| {statistics.median(run.ttft_ms for run in alike):.2f} "
            f"| {statistics.median(run.step_ms for run in alike):.2f} "
            f"| {statistics.median(ratios):.2f} | {percentile(ratios, 90):.2f} "
            f"| {' | '.join(medians)} |"
        )
    return "\n".join(lines)


async def run_once(
    client: AsyncClient, options: argparse.Namespace, mode: Mode, session: SessionKind | None, prefix: int, seed: int
) -> ChainResult:
    """One chain, from empty caches."""
    profile = Profile(name="finalize", prefix=prefix, output=options.output, last_output=_LAST_OUTPUT, agents=2)
    await client.reset_caches()
    return await client.run(
        ids_chain(profile, seed=seed, vocabulary=options.vocabulary), None, SubmitOptions(mode=mode, session=session)
    )


async def measure(options: argparse.Namespace, folder: Path) -> list[FinalizeRun]:
    """Run everything; returns what was measured."""
    runs: list[FinalizeRun] = []
    async with connection(options) as client:
        status = await client.status()
        check_ready(status)
        options.vocabulary = min(worker.limits.vocabulary_size for worker in status.workers if worker.limits)
        made = made_with(status)
        kinds = [(m, s, p) for p in options.prefix for s in options.sessions for m in options.modes]
        for index in counted(range(-1, options.runs), "rounds"):
            for mode, session, prefix in in_order(kinds, index, "alternate"):
                result = await run_once(client, options, mode, session, prefix, index + 1)
                upper, lower = result.agents
                if index < 0 or lower.ttft_ms is None or lower.total_ms is None:
                    continue
                sent = sum(entry.tokens for entry in lower.appends)
                run = FinalizeRun(
                    mode=mode,
                    session=lower.session,
                    prefix=prefix,
                    output=options.output,
                    index=index,
                    prompt_tokens=lower.prompt_tokens,
                    final_tokens=lower.prompt_tokens - sent,
                    cached_tokens=lower.cached_tokens,
                    appends=len(lower.appends),
                    gave_up=any(
                        entry.done_ms is None or entry.done_ms > (upper.last_token_ms or 0.0) for entry in lower.appends
                    ),
                    ttft_ms=lower.ttft_ms,
                    step_ms=(lower.total_ms - lower.ttft_ms) / (lower.output_tokens - 1),
                    stages=stage_times(read_trace(folder), f"{result.id}/1/0", f"{result.id}/0/0"),
                    provenance=made,
                )
                runs.append(run)
                if options.out:
                    append_line(options.out, run)
            print(f"round {index + 1} of {options.runs}" if index >= 0 else "warm-up", file=sys.stderr, flush=True)
    return runs


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Account for the time between two agents.")
    add_daemon_arguments(parser)
    parser.add_argument("--prefix", default="4096", help="tokens of each agent's own text; comma-separated")
    parser.add_argument("--output", type=int, default=256, help="tokens that the upstream writes")
    parser.add_argument("--modes", default="ping-pong", help=f"of {', '.join(MODES)}; comma-separated")
    parser.add_argument("--sessions", default="prefix-cache", help=f"of {', '.join(SESSIONS)}; comma-separated")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSONL file that the runs are added to")
    parser.add_argument("--report", type=Path, help="only report the runs of this file")
    options = parser.parse_args()
    if options.config is None and options.report is None:
        parser.error("--config: the daemon has to be started here, for it is traced")
    options.prefix = [int(text) for text in options.prefix.split(",")]
    options.modes, options.sessions = options.modes.split(","), options.sessions.split(",")
    for flag, given, known in (("modes", options.modes, MODES), ("sessions", options.sessions, SESSIONS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{flag}: {unknown[0]!r} is none of {', '.join(known)}")
    return options


@command
def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    if options.report:
        runs = read_lines(options.report, FinalizeRun)
    else:
        with tempfile.TemporaryDirectory(prefix="pingpong-trace-") as folder:
            os.environ[TRACE] = folder
            runs = asyncio.run(measure(options, Path(folder)))
    print(render(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
