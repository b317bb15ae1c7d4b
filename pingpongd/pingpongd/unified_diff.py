"""Unified diffs, applied to the letter: no fuzz, no offsets, no guessing. Pure.

A hunk fits where it says it does and nowhere else, and every line of its context and of what it removes is compared
byte for byte. So what was applied can be taken back, and gives the same bytes as before. Renames, copies, removals,
changes of mode and binary patches are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pingpong_bus.errors import ConfigError

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?$")
_REFUSED = (b"rename ", b"copy ", b"old mode", b"new mode ", b"deleted file", b"GIT binary patch", b"Binary files ")
_NO_NEWLINE = b"\\ No newline at end of file"
_ABSENT = b"/dev/null"


@dataclass(frozen=True)
class Hunk:
    """One hunk; lines are with their newlines, where they have one."""

    before_at: int
    """Index, from 0, of its first line in the file before."""
    before: tuple[bytes, ...]
    after_at: int
    after: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """What a patch changes in one file."""

    path: str
    """Without the `a/` or `b/`; it stays within the tree."""
    added: bool
    """There was no such file before."""
    hunks: tuple[Hunk, ...]

    def apply(self, data: bytes | None) -> bytes:
        """The file's content with the patch; None: there is no such file.

        Raises:
            ConfigError: it does not fit.
        """
        if self.added != (data is None):
            raise ConfigError(f"{self.path}: there is {'such a file already' if self.added else 'no such file'}.")
        return _apply(self.path, data or b"", self.hunks)

    def revert(self, data: bytes | None) -> bytes | None:
        """The file's content as it was before the patch.

        Raises:
            ConfigError: it does not fit.
        """
        turned = tuple(Hunk(hunk.after_at, hunk.after, hunk.before_at, hunk.before) for hunk in self.hunks)
        if data is None:
            raise ConfigError(f"{self.path}: there is no such file.")
        before = _apply(self.path, data, turned)
        if not self.added:
            return before
        if before:
            raise ConfigError(f"{self.path}: there is more in it than was added.")
        return None


def parse_diff(data: bytes, name: str) -> tuple[bytes, tuple[FileDiff, ...]]:
    """Take a patch apart.

    Args:
        data: the patch file.
        name: of it, for errors.

    Returns:
        What stands before the first diff, and the diffs, each of another file.

    Raises:
        ConfigError: it is no unified diff, or does what we refuse.
    """
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    first = next((at for at, line in enumerate(lines) if line.startswith((b"diff --git ", b"--- a/", b"--- /dev/"))), 0)
    files = tuple(_files(lines, first, name))
    if not files:
        raise _off(name, len(lines), "it holds no diff")
    paths = [each.path for each in files]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise _off(name, 1, f"it changes {twice} twice")
    return b"\n".join(lines[:first]), files


def _files(lines: list[bytes], at: int, name: str) -> Iterator[FileDiff]:
    while at < len(lines):
        line = lines[at]
        if line == b"-- ":  # git's signature follows
            return
        if line.startswith(_REFUSED):
            raise _off(name, at + 1, "renames, copies, modes and binary patches are refused")
        if not line.startswith(b"--- "):
            if line and not line.startswith((b"diff --git ", b"index ", b"new file mode ")):
                raise _off(name, at + 1, "this is part of no diff")
            at += 1
            continue
        if at + 1 >= len(lines) or not lines[at + 1].startswith(b"+++ "):
            raise _off(name, at + 1, "after --- a line with +++ is missing")
        before, after = _path(line[4:], b"a/", name, at), _path(lines[at + 1][4:], b"b/", name, at + 1)
        if after is None or before not in (None, after):
            raise _off(name, at + 1, "a file is renamed or removed, which is refused")
        hunks: list[Hunk] = []
        at += 2
        while at < len(lines) and lines[at].startswith(b"@@ "):
            hunk, at = _hunk(lines, at, name)
            hunks.append(hunk)
        if not hunks:
            raise _off(name, at, "a file has no hunk")
        if before is None and (len(hunks) > 1 or hunks[0].before):
            raise _off(name, at, "a new file is one hunk of all its lines")
        yield FileDiff(after, before is None, tuple(hunks))


def _path(field: bytes, prefix: bytes, name: str, at: int) -> str | None:
    field = field.split(b"\t")[0]
    if field == _ABSENT:
        return None
    try:
        text = field.decode("ascii")
    except UnicodeDecodeError:
        raise _off(name, at + 1, "a path of other than ASCII characters is refused") from None
    parts = text.split("/")
    if not field.startswith(prefix) or ".." in parts or "." in parts or "" in parts or "\\" in text or '"' in text:
        raise _off(name, at + 1, f"the path is not of the form {prefix.decode()}folder/file")
    return "/".join(parts[1:])


def _hunk(lines: list[bytes], at: int, name: str) -> tuple[Hunk, int]:
    """The hunk that begins at a line, and the line after it."""
    match = _HUNK.match(lines[at])
    if match is None:
        raise _off(name, at + 1, "the head of a hunk is not one")
    old_start, old_count = int(match[1]), int(match[2] or 1)
    new_start, new_count = int(match[3]), int(match[4] or 1)
    begin = at + 1
    before: list[bytes] = []
    after: list[bytes] = []
    at = begin
    while len(before) < old_count or len(after) < new_count:
        if at >= len(lines):
            raise _off(name, at, "the last hunk is cut off")
        mark, rest = lines[at][:1], lines[at][1:]
        bare = at + 1 < len(lines) and lines[at + 1] == _NO_NEWLINE
        text = rest if bare else rest + b"\n"
        if mark == b"":  # editors take the space off an empty line of context
            mark = b" "
        if mark not in (b" ", b"-", b"+"):
            raise _off(name, at + 1, "a line of a hunk begins with none of space, - and +")
        if mark != b"+":
            before.append(text)
        if mark != b"-":
            after.append(text)
        at += 2 if bare else 1
    if len(before) != old_count or len(after) != new_count:
        raise _off(name, at, "a hunk has other numbers of lines than its head says")
    # "@@ -0,0" and "@@ -12,0" name the line after which something is put in; others, from 1, the first that they hold.
    before_at = old_start if old_count == 0 else old_start - 1
    after_at = new_start if new_count == 0 else new_start - 1
    if before_at < 0 or after_at < 0:
        raise _off(name, begin, "lines are counted from 1")
    return Hunk(before_at, tuple(before), after_at, tuple(after)), at


def _apply(path: str, data: bytes, hunks: tuple[Hunk, ...]) -> bytes:
    lines = _split(data)
    made: list[bytes] = []
    at = 0
    for hunk in hunks:
        end = hunk.before_at + len(hunk.before)
        made += lines[at : hunk.before_at]
        if hunk.before_at < at or tuple(lines[hunk.before_at : end]) != hunk.before or hunk.after_at != len(made):
            raise ConfigError(f"{path}: the hunk at line {hunk.before_at + 1} does not fit.")
        made += hunk.after
        at = end
    made += lines[at:]
    if any(not line.endswith(b"\n") for line in made[:-1]):
        raise ConfigError(f"{path}: a line without a newline would stand before others.")
    return b"".join(made)


def _split(data: bytes) -> list[bytes]:
    """Lines with their ends, which are LF alone: `splitlines` takes CR for one, too."""
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _off(name: str, line: int, why: str) -> ConfigError:
    return ConfigError(f"{name}, line {line}: {why}.", hint="Take the patches from the release of this pingpongd.")
