"""Makes a version's manifest.json: the SHA-256 of every file that its patches touch, before and after each.

    .venv/bin/python patches/make_manifest.py 0.32.0 [--vllm DIR] [--check]

The vLLM has to be of that version, and its files as they were released, or as `pingpongd patch` left them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from pingpong_bus.errors import ConfigError, PingpongError
from pingpongd.patch_folder import MANIFEST, read_patches
from pingpongd.patch_series import Manifest, make_manifest
from pingpongd.patch_work import KEPT, kept_state
from pingpongd.vllm_installation import Installation, find_vllm
from pingpongd.whole_files import read_file


def manifest_of(folder: Path, installation: Installation) -> Manifest:
    """The manifest of a version's folder.

    Raises:
        ConfigError: the vLLM is of another version, or a patch does not fit.
    """
    if installation.version != folder.name:
        raise ConfigError(f"{installation.package} is vLLM {installation.version}, not {folder.name}.")
    patches = read_patches(folder)
    paths = sorted({each.path for patch in patches for each in patch.files})
    return make_manifest(folder.name, patches, {path: _original(installation, path) for path in paths})


def _original(installation: Installation, path: str) -> bytes | None:
    kept = kept_state(installation)
    if kept is not None and path in kept.files:
        return read_file(installation.site / KEPT / path)
    return read_file(installation.site / path)


def main() -> int:
    """Run the script; returns its exit code: with --check 1 where the file is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="of vLLM: the name of the folder")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="vLLM's folder, over the one that Python finds")
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether it is up to date")
    options = parser.parse_args()
    folder = Path(__file__).parent / options.version
    try:
        made = manifest_of(folder, find_vllm(options.vllm))
    except PingpongError as error:
        sys.stderr.write(f"make_manifest: {error}\n")
        return 1
    data = msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"
    if options.check:
        return int(not (folder / MANIFEST).is_file() or (folder / MANIFEST).read_bytes() != data)
    (folder / MANIFEST).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
