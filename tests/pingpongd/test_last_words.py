"""Files with the last words of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pingpongd.last_words import keep_last_words, log_folder, warn_of_folder


def test_a_file_for_each(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    keep_last_words(folder, "a", "it ended with signal 9", ["one", "two \udcff"])
    (file,) = folder.iterdir()
    assert file.name.startswith("worker-a-")
    assert file.stat().st_mode & 0o777 == 0o600
    first, *rest = file.read_text().splitlines()
    assert first.endswith(" it ended with signal 9")
    assert rest == ["one", "two ?"]


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    (tmp_path / "pingpongd.log").touch()
    for number in range(25):
        keep_last_words(tmp_path, "z-1" if number % 2 else "a", str(number), [])
    kept = sorted(int(file.read_text().split()[-1]) for file in tmp_path.glob("worker-*"))
    assert kept == list(range(5, 25))
    assert (tmp_path / "pingpongd.log").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with capture_logs() as logs:
        keep_last_words(tmp_path / "taken", "a", "why", [])
    assert [line["event"] for line in logs] == ["last_words_not_kept"]


def test_a_folder_that_cannot_be_had_is_told_before_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with capture_logs() as logs:
        warn_of_folder(None)
        warn_of_folder(tmp_path / "a" / "b")
        assert logs == []
        warn_of_folder(tmp_path / "taken" / "b")
    assert [(line["event"], line["log_level"]) for line in logs] == [("log_dir_unusable", "warning")]
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("configured", "variable", "expected"),
    [(None, "", None), (None, "/one:/two", "/one"), ("/mine", "/one", "/mine")],
)
def test_where_they_go(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, variable: str, expected: str | None
) -> None:
    monkeypatch.setenv("LOGS_DIRECTORY", variable)
    assert log_folder(configured) == (Path(expected) if expected else None)
