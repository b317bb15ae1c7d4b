"""What a worker printed last before it died, kept in a file for whoever looks for the cause."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog

from pingpongd.logs import redacted

_log = structlog.get_logger()
_KEPT_FILES = 20


def log_folder(configured: str | None) -> Path | None:
    """Where last words go: the configured folder, else the service manager's, else nowhere."""
    # $LOGS_DIRECTORY lists several folders where the unit names several; the first is the daemon's own.
    found = configured or os.environ.get("LOGS_DIRECTORY", "").split(":")[0]
    return Path(found) if found else None


def warn_of_folder(folder: Path | None) -> None:
    """Make the folder, and say so in the log where it cannot be had: better now than when a worker has died."""
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return
        why = "it cannot be written"
    except OSError as error:
        why = error.strerror or str(error)
    _log.warning("log_dir_unusable", path=str(folder), error=why, effect="last words of workers will not be kept")


def keep_last_words(folder: Path, worker: str, why: str, lines: Sequence[str]) -> None:
    """Write ``worker-NAME-TIME.log``, readable for this user alone, and drop the oldest such files.

    Secrets and long quotations are left out, as in the log. A folder that cannot be written costs a warning there and
    nothing else.
    """
    time = datetime.now(UTC)
    path = folder / f"worker-{worker}-{time:%Y%m%dT%H%M%S.%fZ}.log"
    text = "\n".join([f"{time.isoformat()} {redacted(why)}", *map(redacted, lines), ""])
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        # By the time in the name, and not by the file's, which a copy or a clock that was set changes.
        ours = sorted(folder.glob("worker-*.log"), key=lambda entry: entry.stem.rpartition("-")[2])
        for old in ours[:-_KEPT_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("last_words_not_kept", path=str(path), error=error.strerror)
