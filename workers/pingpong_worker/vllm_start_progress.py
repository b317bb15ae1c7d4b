"""What vLLM's processes do while they start, told to the worker.

vLLM says so in log lines, which are switched off, and in progress bars, which are drawn for a person. Here the methods
of its worker that a start calls one after the other tell their names, and tqdm's bars tell what they would draw:
shards of weights that were read, graphs that were captured, bytes that were downloaded.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pingpong_bus.messages import Progress
from pingpong_worker.start_progress import START_PROGRESS, tell

STAGES: Final = {
    "init_device": "taking the device",
    "load_model": "loading the weights",
    "determine_available_memory": "compiling, and measuring the memory",
    "initialize_from_config": "setting up the KV cache",
    "compile_or_warm_up_model": "warming up",
}
"""Methods of vLLM's worker, in the order in which a start calls them."""
_BARS: Final = (
    ("shards", "loading the weights", "shards"),
    ("CUDA graphs", "capturing CUDA graphs", "graphs"),
    ("CUDAGraph", "capturing CUDA graphs", "graphs"),
)
"""What a bar's title holds, and what that is called here, with its unit."""
_BETWEEN_S = 0.2
"""Between two lines of one bar."""


def tell_stages(worker: type[Any], path: Path) -> None:
    """Have a class of vLLM's workers tell its stages; of several ranks the first one does."""
    for name, stage in STAGES.items():
        if (method := getattr(worker, name, None)) is not None:
            setattr(worker, name, _telling(method, Progress(stage=stage), path))


def tell_bars(bar_class: type[Any], path: Path) -> None:
    """Have a class of tqdm's bars tell what it shows; drawn as it was."""
    display = bar_class.display
    told: dict[int, float] = {}

    @functools.wraps(display)
    def display_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        if self.n == self.total or now - told.get(id(self), 0.0) >= _BETWEEN_S:
            told.clear()  # bars come one after the other, and their ids come again
            told[id(self)] = now
            tell(path, bar_progress(self.desc or "", self.n, self.total, self.unit))
        return display(self, *args, **kwargs)

    bar_class.display = display_and_tell


def bar_progress(title: str, done: float, total: float | None, unit: str) -> Progress:
    """What a bar shows, in our words."""
    if unit == "B":
        return Progress(stage="downloading the model", done=done, total=total or 0, unit="bytes")
    for words, stage, counted in _BARS:
        if words in title:
            return Progress(stage=stage, done=done, total=total or 0, unit=counted)
    title = title.strip(" :")
    return Progress(stage=title[:1].lower() + title[1:] or "loading", done=done, total=total or 0)


def tell_start() -> None:
    """Do both in this process of vLLM's, where a worker wants to know. Call it once."""
    path = os.environ.get(START_PROGRESS)
    if not path:
        return
    import tqdm

    tell_bars(tqdm.std.tqdm, Path(path))
    # Workers on CPUs are of a class of ours, which does it itself. On several GPUs each has a process of its own, and
    # the engine's core need not load what they do.
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if devices and ("," not in devices or "vllm.v1.engine.core" not in sys.modules):
        try:
            from vllm.v1.worker.gpu_worker import Worker
        except ImportError:  # for another version to say: an engine starts without this
            return
        tell_stages(Worker, Path(path))


def _telling(method: Callable[..., Any], progress: Progress, path: Path) -> Callable[..., Any]:
    @functools.wraps(method)
    def tell_and_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "rank", 0) == 0:
            tell(path, progress)
        return method(self, *args, **kwargs)

    return tell_and_run
