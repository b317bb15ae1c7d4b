"""The folder of patches: `patches/` of a checkout, or what a wheel has of it; a folder for each version of vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from pingpong_bus.errors import ConfigError
from pingpongd.patch_series import Manifest, Patch, Series, joined, read_patch, read_series

SERIES = "series"
MANIFEST = "manifest.json"
_VERSION = re.compile(r"^\d+\.\d+\.\d+$")


def shipped() -> Path:
    """Where this installation's patches are: in the package, or in the checkout that it was installed from."""
    package = Path(__file__).parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parents[1] / "patches"


def versions(folder: Path) -> list[str]:
    """Versions of vLLM that there are patches for, the oldest first."""
    found = [each.name for each in folder.iterdir() if _VERSION.match(each.name)] if folder.is_dir() else []
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")])


def load_series(folder: Path, version: str) -> Series:
    """Read the patches to a version.

    Args:
        folder: that holds a folder for each version.
        version: of vLLM.

    Raises:
        ConfigError: there are none for it, or they are not as their manifest says.
    """
    if version not in versions(folder):
        known = " and ".join(versions(folder))
        raise ConfigError(
            f"there are no patches to vLLM {version}.",
            hint=f"There are for {known}; other versions serve without." if known else f"There are none in {folder}.",
        )
    path = folder / version / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", hint="patches/make_manifest.py makes it.") from None
    if manifest.vllm != version:
        raise ConfigError(f"{path} is for vLLM {manifest.vllm}.")
    return joined(manifest, read_patches(folder / version))


def read_patches(folder: Path) -> list[Patch]:
    """Read the patches of a version's `series`.

    Raises:
        ConfigError: one cannot be read, or is no patch.
    """
    try:
        names = read_series((folder / SERIES).read_text())
        return [read_patch(name, (folder / name).read_bytes()) for name in names]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from None
