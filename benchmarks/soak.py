"""Run thousands of chains while workers, engines, the supervisor and clients die at random.

    python benchmarks/soak.py --out benchmarks/results/soak.jsonl               10,000 chains, simulated engines
    python benchmarks/soak.py --real --out benchmarks/results/soak-real.jsonl   200 chains, two real engines

Kept are samples of memory, descriptors, processes and segments, and a summary: tokens lost or doubled, chains that
failed, ends that nobody asked for, anything left behind; and how much the last life of the supervisor, in which
workers and engines go on dying, has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

from progress_bar import counting
from provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from faults.service import Service
from faults.soak import Job, Sample, Soak, Summary, growth
from faults.soak_jobs import SIMULATED, simulated_jobs
from faults.soak_real import REAL, real_jobs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="on two real engines")
    parser.add_argument("--chains", type=int, metavar="N", help="default: 10,000, with --real 200")
    parser.add_argument("--at-once", type=int, metavar="N", help="chains that wait or run (default: 48, --real 8)")
    parser.add_argument("--kill-every", type=float, metavar="S", help="mean seconds between faults (default: 2, 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="append samples and summary as JSON lines")
    return parser.parse_args()


async def soak(options: argparse.Namespace, samples: list[Sample]) -> Summary:
    """Run it in a folder that is gone afterwards."""
    count = options.chains or (200 if options.real else 10_000)
    at_once = options.at_once or (8 if options.real else 48)
    kill_every_s = options.kill_every or (40.0 if options.real else 2.0)

    def tell(sample: Sample) -> None:
        done(sample.chains - (samples[-1].chains if samples else 0))
        samples.append(sample)
        print(msgspec.json.encode(sample).decode(), file=sys.stderr, flush=True)

    with counting("chains", count) as done, tempfile.TemporaryDirectory(prefix="pp-") as name:
        service = Service(Path(name) / "s")
        config = REAL if options.real else SIMULATED
        jobs: list[Job] = await real_jobs(service, count) if options.real else simulated_jobs(count, options.seed)
        try:
            return await Soak(
                service,
                config,
                jobs,
                at_once=at_once,
                kill_every_s=kill_every_s,
                seed=options.seed,
                patience_s=300.0 if options.real else 120.0,
                tell=tell,
            ).run()
        finally:
            service.kill()


def main() -> int:
    options = parse_arguments()
    made_with = provenance()
    samples: list[Sample] = []
    summary = asyncio.run(soak(options, samples))
    grown = growth(samples)
    whole = {**msgspec.to_builtins(summary), "growth": grown, "real": options.real, "provenance": made_with}
    print(msgspec.json.format(msgspec.json.encode(whole)).decode())
    if options.out is not None:
        with options.out.open("ab") as out:
            for row in (*(msgspec.to_builtins(sample) for sample in samples), whole):
                out.write(msgspec.json.encode(row) + b"\n")
    return 1 if summary.faults or summary.finished != summary.chains else 0


if __name__ == "__main__":
    sys.exit(main())
