"""Record what NVML answers to the daemon's questions about a GPU: idle, beside one process, beside two, and after.

    python benchmarks/nvml_record.py --out tests/recordings/nvml_NAME.json

Tests play such recordings where there is no GPU (`tests/nvml_player.py`). The first process stands for a group's own:
small matrix products, as decoding has them. The second is foreign, and its products are large. Also printed: what the
daemon's probe made of each look, and how much CPU time each question took. Needs torch with CUDA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from commands import command
from pingpong_bus.errors import UsageError
from pingpongd.gpu_probe import GpuProbe
from pingpongd.nvml import Nvml, NvmlRefused, load_nvml
from pingpongd.proc_files import descends, first_pid_namespace

_LOAD = """
import sys, torch
size = int(sys.argv[1])
a = torch.randn(size, 8192, device="cuda", dtype=torch.bfloat16)
b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("up", flush=True)
while True:
    for _ in range(50):
        a @ b
    torch.cuda.synchronize()
"""
_PHASES = (("idle", 3), ("one", 4), ("two", 6), ("one again", 4), ("after", 3))
_LOOK_S = 1.0
_PROC = Path("/proc")


class Recorder:
    """NVML that keeps what it answers."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self.answers: dict[str, Any] = {}
        self.cpu_ms: dict[str, list[float]] = defaultdict(list)
        self.took_ms: dict[str, list[float]] = defaultdict(list)

    def ask(self, call: str, handle: Any, *args: int) -> Any:
        """As NVML; the key is the call with its arguments, but for times, which no later run repeats."""
        times = call == "nvmlDeviceGetProcessUtilization"
        return self._keep(" ".join([call, *map(str, (0,) if times else args)]), self._nvml.ask, call, handle, *args)

    def fields(self, handle: Any, ids: Sequence[int]) -> dict[int, int]:
        """As NVML."""
        key = " ".join(["fields", *map(str, ids)])
        found: dict[int, int] = self._keep(key, self._nvml.fields, handle, ids)
        return found

    def next_xid(self) -> tuple[str, int] | None:
        """As NVML."""
        found: tuple[str, int] | None = self._keep("next_xid", self._nvml.next_xid)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvml, name)

    def _keep(self, key: str, function: Callable[..., Any], *args: Any) -> Any:
        began, clock = time.thread_time(), time.perf_counter()
        try:
            value = function(*args)
        except NvmlRefused as refusal:
            self.answers[key] = {"error": refusal.code}
            raise
        else:
            self.answers[key] = {"value": _plain(value)}
            return value
        finally:
            self.cpu_ms[key].append(1000 * (time.thread_time() - began))
            self.took_ms[key].append(1000 * (time.perf_counter() - clock))


def _plain(value: Any) -> Any:
    """NVML's structs and listings as JSON has them."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, int | float | str):
        return value
    names = [name for name, *_ in getattr(value, "_fields_", [])] or list(vars(value))
    return {name: _plain(getattr(value, name)) for name in names}


@contextmanager
def load(rows: int) -> Iterator[int]:
    """A process that multiplies matrices of so many rows, by its pid."""
    with subprocess.Popen([sys.executable, "-c", _LOAD, str(rows)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            if process.stdout.readline() != "up\n":
                raise UsageError("the process that loads the GPU did not start.", hint="It needs torch with CUDA.")
            yield process.pid
        finally:
            process.kill()


def record(nvml: Nvml) -> tuple[list[dict[str, Any]], Recorder]:
    """All phases on the first card, a look a second."""
    recorder = Recorder(nvml)
    uuid, frames = recorder.uuids()[0], []
    probe = GpuProbe(
        recorder,
        same_pids=first_pid_namespace(_PROC),
        descends=lambda pid, family: descends(_PROC, pid, family),
    )
    with ExitStack() as ours, ExitStack() as theirs:
        own: list[int] = []
        for label, looks in _PHASES:
            if label == "one":
                own.append(ours.enter_context(load(16)))
            elif label == "two":
                theirs.enter_context(load(8192))
            elif label == "one again":
                theirs.close()
            elif label == "after":
                ours.close()
            for _ in range(looks):
                time.sleep(_LOOK_S)
                recorder.answers = {}
                probe.begin()
                state = probe.look("recorded", [uuid], own)[0]
                print(label, msgspec.json.encode(state).decode(), flush=True)
                frames.append({"label": label, "own": list(own), "devices": [recorder.answers]})
    return frames, recorder


def text(about: str, frames: Sequence[dict[str, Any]]) -> str:
    """The recording, a line an answer, so that a change of one can be read."""
    parts = []
    for frame in frames:
        answers = ",\n".join(f" {json.dumps(key)}: {json.dumps(answer)}" for key, answer in frame["devices"][0].items())
        head = f'{{"label": {json.dumps(frame["label"])}, "own": {json.dumps(frame["own"])}, "devices": [{{\n'
        parts.append(f"{head}{answers}\n}}]}}")
    return f'{{\n"about": {json.dumps(about)},\n"frames": [\n' + ",\n".join(parts) + "\n]\n}\n"


@command
def main() -> int:
    """Record, and say what each question took."""
    parser = argparse.ArgumentParser(description="Record what NVML answers.")
    parser.add_argument("--out", type=Path, required=True, help="the recording")
    options = parser.parse_args()
    try:
        nvml = load_nvml()
        name = nvml.ask("nvmlDeviceGetName", nvml.handle(nvml.uuids()[0]))
    except NvmlRefused as refusal:
        raise UsageError(f"NVML: {refusal}.") from None
    frames, recorder = record(nvml)
    about = f"What NVML answered to the daemon's questions on an {_plain(name)}; made by benchmarks/nvml_record.py."
    options.out.write_text(text(about, frames))
    for key, taken in recorder.cpu_ms.items():
        clock = statistics.median(recorder.took_ms[key])
        print(f"{key:<48} {len(taken):>3} x  {statistics.median(taken):8.3f} ms CPU  {clock:8.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
