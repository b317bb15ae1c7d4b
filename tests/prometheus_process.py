"""Prometheus and promtool, for tests; `.ci/run` fetches them into the user's cache, without root."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

HANG_SECONDS = 60.0
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pingpongd-tests" / "prometheus"


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`; without it the test is skipped."""
    for folder in (os.environ.get("PINGPONG_TEST_PROMETHEUS"), str(_CACHE / "usr" / "bin")):
        if folder and (found := shutil.which(name, path=folder)):
            return found
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: install Debian's package prometheus, or let .ci/fetch-prometheus fetch it")
    return found


class Prometheus:
    """A server that scrapes one target every second and evaluates rules."""

    def __init__(self, folder: Path, target: str, rules: Path) -> None:
        program = tool("prometheus")
        self.log = folder / "prometheus.log"
        configuration = folder / "prometheus.yml"
        configuration.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{json.dumps(str(rules))}]\n"
            "scrape_configs: [{job_name: pingpongd, static_configs: "
            f"[{{targets: [{json.dumps(target)}]}}]}}]\n"
        )
        self.port = free_port()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(program, f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"),
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ask(self, path: str, **given: str) -> Any:
        """What the API answers: its `data`.

        Raises:
            AssertionError: it refuses.
        """
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        try:
            with urllib.request.urlopen(url, timeout=HANG_SECONDS) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{given or path}: {error.read().decode()}") from None
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The same, once there are some."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"Prometheus ended with {self.process.returncode}:\n{self.log.read_text()}")
            try:
                if found := self.query(expression):
                    return found
            except urllib.error.URLError:  # it starts
                pass
            time.sleep(0.1)
        pytest.fail(f"nothing came of {expression}:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
