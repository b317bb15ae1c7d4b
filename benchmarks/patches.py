"""What each patch to vLLM buys: the same trials on the installed vLLM and on a patched copy of it.

    python benchmarks/patches.py                                         # on CPUs, the embedded model in float32
    python benchmarks/patches.py --device gpu --model benchmarks/models/qwen3-14b --out patches-h200.jsonl
    python benchmarks/patches.py --report benchmarks/results/patches-cpu.jsonl

Trials: `append` (an append with and without a sample, alternating in one engine), `seeded-session` (a sampled answer
from a session fed in parts), `pressure` (sessions pause on the memory that a request needs), `progress` (the longest
silence during a prompt), `seeded-split` (a seeded prompt longer than a step), `orphans` (what is left of an engine when
its parent is killed). Each runs in processes of its own, which are ended. A row for each is appended to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from patched_vllm import installed_vllm, make_copy
from pingpong_bus.errors import PingpongError
from pingpong_worker.model_store import EMBEDDED_MODEL, resolve_model
from provenance import REPOSITORY, command_line, provenance

RESULTS = REPOSITORY / "benchmarks" / "results" / "patches-cpu.jsonl"
TRIAL_S = 540.0
START_S = 400.0
LEFT_S = 20.0
"""How long what is left of a killed parent may take to end."""
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU = {
    "dtype": "float32",
    "block_size": 32,
    "enforce_eager": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 256 << 20,
}
GPU = {"load_format": "dummy", "max_model_len": 16384, "gpu_memory_utilization": 0.6}
COMMON = {"max_num_seqs": 8}
EACH: dict[str, dict[str, dict[str, Any]]] = {
    "append": {"cpu": {"max_num_batched_tokens": 512}, "gpu": {}},
    "seeded-session": {"cpu": {"max_num_batched_tokens": 512}, "gpu": {}},
    "pressure": {
        "cpu": {"max_num_batched_tokens": 256, "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20},
        "gpu": {"max_model_len": 8192, "num_gpu_blocks_override": 769},
    },
    "progress": {"cpu": {"max_num_batched_tokens": 256}, "gpu": {"max_num_batched_tokens": 1024}},
    "seeded-split": {"cpu": {"max_num_batched_tokens": 256}, "gpu": {"max_num_batched_tokens": 1024}},
}
"""Trials, and their engine arguments on each kind of device."""
MOMENTS = ("first child", "loading", "serving")
"""When a parent is killed: half a second after its first child has begun, four seconds after, and when it serves."""


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="What each patch to vLLM buys.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--model", help="a folder (default: the embedded model)")
    parser.add_argument("--trial", action="append", choices=(*EACH, "orphans"), help="only this one; may be repeated")
    parser.add_argument("--side", choices=("stock", "patched"), help="only this one")
    parser.add_argument("--core", type=int, default=0, help="of CPU engines (%(default)s)")
    parser.add_argument("--args", type=json.loads, default={}, help="engine arguments as JSON, over the trial's own")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", type=Path, metavar="FILE", help="run nothing; show what a file holds")
    options = parser.parse_args()
    if options.report:
        print(report([json.loads(line) for line in options.report.read_text("utf-8").splitlines()]))
        return 0
    try:
        rows = run(options)
    except PingpongError as error:
        print(f"patches.py: {error}", file=sys.stderr)
        return error.exit_code
    print(report(rows))
    return 0


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the trials; each row is appended to the file as it comes."""
    model = options.model or str(resolve_model(EMBEDDED_MODEL))
    _, version = installed_vllm()
    base = {**COMMON, **(CPU if options.device == "cpu" else GPU)}
    rows: list[dict[str, Any]] = []
    with copy_of_vllm() as copy:
        for trial in options.trial or (*EACH, "orphans"):
            for side in (options.side,) if options.side else ("stock", "patched"):
                environment = environment_of(options, copy if side == "patched" else None)
                arguments = {**base, **EACH.get(trial, EACH["append"])[options.device], **options.args}
                if trial == "orphans":
                    found: dict[str, Any] = {
                        moment: orphans(environment, model, arguments, moment) for moment in MOMENTS
                    }
                else:
                    found = trial_of(environment, trial, model, arguments)
                row = {
                    "patches": trial,
                    "side": side,
                    "version": version,
                    "device": options.device,
                    "model": Path(model).name,
                    "engine_args": arguments,
                    "found": found,
                    "command": command_line(),
                    "provenance": provenance(),
                }
                rows.append(row)
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{trial} {side}: {json.dumps(found)}", file=sys.stderr)
    return rows


@contextmanager
def copy_of_vllm() -> Iterator[Path]:
    """A patched copy, for as long as it is needed."""
    folder = Path(tempfile.mkdtemp(prefix="patched-vllm-"))
    try:
        yield make_copy(folder / "site")
    finally:
        shutil.rmtree(folder)


def environment_of(options: argparse.Namespace, copy: Path | None) -> dict[str, str]:
    """The environment of a trial: with the copy of vLLM before the installed one."""
    environment = {**os.environ, **ENVIRONMENT}
    paths = [*([str(copy)] if copy else ()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if options.device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = str(options.core)
    return environment


def start(
    environment: Mapping[str, str],
    trial: str,
    model: str,
    arguments: Mapping[str, Any],
    errors: IO[str] | int = subprocess.DEVNULL,
) -> subprocess.Popen[str]:
    """Start a trial in a session of its own, by which all that it starts is found again."""
    return subprocess.Popen(
        [
            *(sys.executable, str(Path(__file__).with_name("patch_trials.py")), trial),
            *("--model", model, "--args", json.dumps(arguments)),
        ],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )


def trial_of(environment: Mapping[str, str], trial: str, model: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a trial found; where it ended without a word, its exit code."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = start(environment, trial, model, arguments, errors)
        try:
            output, _ = process.communicate(timeout=TRIAL_S)
        except subprocess.TimeoutExpired:
            return {"ended": "too late"}
        finally:
            end(process)
        said = [line for line in output.splitlines() if line.startswith("{")]
        if said:
            return dict(json.loads(said[-1]))
        errors.seek(0)
        words = [line.strip() for line in errors if "Error" in line]
        return {"ended": process.returncode, "error": words[0][-200:] if words else ""}


def orphans(environment: Mapping[str, str], model: str, arguments: Mapping[str, Any], moment: str) -> dict[str, Any]:
    """Kill an engine's parent, and see what is left of it."""
    process = start(environment, "stay", model, arguments)
    try:
        wait_for(process, moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        while members(process.pid) and time.monotonic() - killed < LEFT_S:
            time.sleep(0.05)
        left = members(process.pid)
        return {
            "left": len(left),
            "left_mib": round(sum(map(memory_of, left)) / 2**20),
            "gone_s": None if left else round(time.monotonic() - killed, 2),
        }
    finally:
        end(process)


def wait_for(process: subprocess.Popen[str], moment: str) -> None:
    """Wait until an engine that starts has come so far."""
    if moment == "serving":
        for line in process.stdout or ():
            if line.startswith('{"serves"'):
                return
        raise RuntimeError("the engine did not start")
    deadline = time.monotonic() + START_S
    while not any(engine_like(each) for each in members(process.pid) if each.pid != process.pid):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the engine did not start")
        time.sleep(0.02)
    time.sleep(0.5 if moment == "first child" else 4.0)


def engine_like(process: psutil.Process) -> bool:
    """Whether a process is one of vLLM's, and not Python's resource tracker."""
    try:
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


def members(session: int) -> list[psutil.Process]:
    """The living processes of a session, but for resource trackers, which clear up and end by themselves."""
    found: list[psutil.Process] = []
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == session and each.status() != psutil.STATUS_ZOMBIE and engine_like(each):
                found.append(each)
        except (OSError, psutil.Error):
            continue
    return found


def memory_of(process: psutil.Process) -> int:
    """Bytes of memory that a process holds; 0 of one that has gone."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def end(process: subprocess.Popen[str]) -> None:
    """End a trial and all that it started."""
    left = members(process.pid)
    for each in left:
        try:
            each.kill()
        except psutil.Error:
            continue
    process.wait()
    psutil.wait_procs([each for each in left if each.pid != process.pid], timeout=10)
    if process.stdout is not None:
        process.stdout.close()


def report(rows: list[dict[str, Any]]) -> str:
    """What was found, a line for each trial and side."""
    lines = ["| trial | vLLM | found |", "|---|---|---|"]
    lines.extend(
        f"| {row['patches']} | {row['version']} {row['side']}, {row['device']} | {_words(row['found'])} |"
        for row in rows
    )
    return "\n".join(lines)


def _words(found: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for name, value in found.items():
        if name == "abilities":
            continue
        text = f"({_words(value)})" if isinstance(value, dict) else json.dumps(value)
        parts.append(f"{name} {text}")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
