"""A client's process, seen from the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from faults.service import CellFault, Service, until


class ClientProcess:
    """A client that can be hit."""

    def __init__(self, service: Service, number: int, how: str, *what: str) -> None:
        self.out = service.folder / f"client-{number}.jsonl"
        self.out.unlink(missing_ok=True)
        self.words = service.folder / f"client-{number}.err"
        script = Path(__file__).with_name("client_process.py")
        with self.words.open("wb") as words:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(service.runtime_dir / "control.sock"), str(self.out), how, *what],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
            )

    def read(self, kind: str) -> list[Any]:
        """What it has written down of one kind; a line that a signal cut off does not count."""
        if not self.out.exists():
            return []
        lines = self.out.read_bytes().split(b"\n")[:-1]
        return [entry[kind] for line in lines if kind in (entry := msgspec.json.decode(line))]

    async def wrote(self, kind: str) -> Any:
        """Wait for the first thing of a kind."""

        def there() -> bool:
            if self.process.poll() is not None and not self.read(kind):
                raise CellFault(f"a client ended with {self.process.returncode}: {self.words.read_text()[-500:]}")
            return bool(self.read(kind))

        await until(there, f"{kind} from a client")
        return self.read(kind)[0]

    def clear(self) -> None:
        """Kill it and remove what it has written."""
        self.kill()
        self.out.unlink(missing_ok=True)
        self.words.unlink(missing_ok=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
