"""The demo and the chain benchmark as commands, on daemons that they start themselves; the engines are simulated."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from daemon_process import HANG_SECONDS, simulated_config, until

ROOT = Path(__file__).parents[2]
DEMO_KEYS = {"serial_ms", "ping_pong_ms", "saved_percent", "downstream_ttft_ratio", "agents", "identical"}


@pytest.fixture
def config(folder: Path) -> Path:
    return write(folder / "config.toml", simulated_config())


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def command(script: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, str(ROOT / script), *map(str, arguments)]


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(script, *arguments), capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


def test_demo_shows_both_runs_and_writes_its_figures(config: Path, folder: Path) -> None:
    chain = ROOT / "examples" / "two_agents.json"
    done = run("examples/demo.py", "--config", config, "--chain", chain, "--pairs", "1", "--out", folder)
    assert done.returncode == 0, done.stderr
    figures = json.loads((folder / "demo.json").read_text())
    assert figures.keys() >= DEMO_KEYS
    assert figures["identical"] is True
    assert figures["agents"] == 2
    assert figures["saved_percent"] == pytest.approx(
        100 * (1 - figures["ping_pong_ms"] / figures["serial_ms"]),
        abs=0.3,  # all three are rounded
    )
    assert "every prompt and answer identical" in done.stdout
    assert (folder / "demo.png").stat().st_size > 8_000


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that only waits to be reaped does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(output: Path, script: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(command(script, *arguments), stdout=file, stderr=file)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupted_demo_leaves_no_daemon(folder: Path, number: signal.Signals) -> None:
    # Long enough to be interrupted: a step takes 50 ms, and the chain hundreds of them.
    config = write(folder / "config.toml", simulated_config(step_ms=50.0))
    output = folder / "output"
    demo = start(output, "examples/demo.py", "--config", config, "--out", folder)
    try:
        await until(lambda: b"Running" in output.read_bytes() or demo.poll() is not None, "the demo runs chains")
        started = psutil.Process(demo.pid).children(recursive=True)
        assert started
        demo.send_signal(number)
        assert demo.wait(timeout=HANG_SECONDS) == 130
    finally:
        demo.kill()
        demo.wait()
    # An engine's process ends by a signal that the end of its worker sends; it may still be about to.
    await until(lambda: not any(map(alive, started)), "everything that the demo started has ended")
    assert b"Traceback" not in output.read_bytes()


def test_demo_says_why_a_daemon_did_not_start(config: Path) -> None:
    config.write_text("groups = 3\n")
    done = run("examples/demo.py", "--config", config)
    assert done.returncode != 0
    assert "groups" in done.stderr
    assert "Traceback" not in done.stderr


def test_chain_benchmark_measures_and_reports_all_modes(config: Path, folder: Path) -> None:
    file = folder / "runs.jsonl"
    options = ("--profile", "smoke", "--runs", "2", "--strict-output-tokens")
    done = run("benchmarks/chain.py", "--config", config, "--out", file, "--strict-equal", *options)
    assert done.returncode == 0, done.stderr
    for line in ("serial: exact 1 of 1", "ping-pong: exact 2 of 2", "presend: exact 2 of 2"):
        assert line in done.stdout
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert [line["warmup"] for line in lines] == [True] * 3 + [False] * 6
    assert lines[-1]["provenance"]["engines"][0]["engine"].startswith("simulated")
    again = run("benchmarks/chain.py", "--report", file)
    assert again.returncode == 0
    assert again.stdout == done.stdout


def test_chain_benchmark_on_a_warm_cache_finds_the_prefixes_and_no_more(config: Path, folder: Path) -> None:
    file = folder / "runs.jsonl"
    done = run(
        "benchmarks/chain.py", "--config", config, "--profile", "smoke", "--runs", "2", "--cache", "warm", "--out", file
    )
    assert done.returncode == 0, done.stderr
    assert "exact 2 of 2" in done.stdout
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    for line in lines:
        cached = [agent["cached_tokens"] for agent in line["result"]["agents"]]
        assert min(cached) >= 160, line["mode"]
        if line["mode"] == "serial":  # the others have what they computed ahead
            assert max(cached) <= 200, "the output of an earlier run"


def test_chain_benchmark_leaves_presend_out_where_it_cannot_be_done(config: Path) -> None:
    chain = ROOT / "examples" / "fan_in.json"
    options = ("--config", config, "--profile", chain, "--runs", "1", "--warmup-runs", "0")
    done = run("benchmarks/chain.py", *options)
    assert done.returncode == 0, done.stderr
    assert "without presend: presend wants a simple chain" in done.stderr
    assert "| ping-pong | 1 |" in done.stdout
    asked = run("benchmarks/chain.py", *options, "--modes", "serial,presend")
    assert asked.returncode == 65
    assert "Traceback" not in asked.stderr


def test_chain_benchmark_runs_each_mode_at_each_level(config: Path, folder: Path) -> None:
    file = folder / "runs.jsonl"
    options = ("--config", config, "--profile", "smoke", "--runs", "1", "--warmup-runs", "0", "--out", file)
    levels = ("--modes", "serial,ping-pong", "--exactness", "fast,grid", "--grid-tokens", "64")
    done = run("benchmarks/chain.py", *options, *levels)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert [(line["exactness"], line["mode"]) for line in lines] == [
        (level, mode) for level in ("fast", "grid") for mode in ("serial", "ping-pong")
    ]
    assert done.stdout.count("ping-pong: exact 1 of 1") == 2
    assert "exactness grid of 64 tokens" in done.stdout
    beside = run("benchmarks/chain.py", *options, "--modes", "serial,overlap")
    assert beside.returncode == 0, beside.stderr
    assert "overlap: exact 1 of 1" in beside.stdout
    refused = run("benchmarks/chain.py", *options, "--exactness", "fast,exact")
    assert refused.returncode == 2
    assert "there is no level 'exact'" in refused.stderr


@pytest.mark.parametrize("script", ["benchmarks/chain.py", "benchmarks/overhead.py", "benchmarks/timeline.py"])
def test_a_report_of_a_file_that_is_not_there_is_one_line(script: str, folder: Path) -> None:
    done = run(script, "--runs" if script.endswith("timeline.py") else "--report", folder / "none.jsonl")
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "none.jsonl cannot be read: No such file" in done.stderr
