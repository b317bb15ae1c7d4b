"""A model with a smaller vocabulary is the same model behind another tokenizer."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from pingpong_bus.errors import ConfigError
from pingpong_worker.model_cut import cut_model

WIDTH = 4


def write_weights(path: Path, tensors: dict[str, tuple[list[int], bytes]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors.values()))


def read_weights(path: Path) -> dict[str, tuple[list[int], bytes]]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = entry["shape"], data[8 + length + begin : 8 + length + end]
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of ten ids: an added token, the bytes a to d, and five merges."""
    folder = tmp_path / "source"
    folder.mkdir()
    vocabulary = ["<e>", *"abcd", "ab", "cd", "abcd", "da", "abda"]
    merges = [["a", "b"], ["c", "d"], ["ab", "cd"], ["d", "a"], "ab da"]
    tokenizer = {
        "added_tokens": [{"id": 0, "content": "<e>"}],
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "vocab": {token: at for at, token in enumerate(vocabulary)},
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10, "hidden_size": WIDTH}))
    (folder / "chat_template.jinja").write_text("{{ x }}")
    draw = random.Random(0)
    table = struct.pack(f"<{10 * WIDTH}f", *(draw.random() for _ in range(10 * WIDTH)))
    other = struct.pack("<3f", 1, 2, 3)
    write_weights(
        folder / "model.safetensors",
        {
            "model.norm": ([3], other),
            "model.embed_tokens.weight": ([10, WIDTH], table),
            "model.last": ([3], other[::-1]),
        },
    )
    return folder


def test_ids_are_kept_with_their_rows_and_merges(source: Path, tmp_path: Path) -> None:
    cut_model(source, tmp_path / "cut", 7)
    tokenizer = json.loads((tmp_path / "cut" / "tokenizer.json").read_text())["model"]
    assert list(tokenizer["vocab"].values()) == list(range(7))
    assert tokenizer["merges"] == [["a", "b"], ["c", "d"]]
    assert json.loads((tmp_path / "cut" / "config.json").read_text()) == {"vocab_size": 7, "hidden_size": WIDTH}
    assert (tmp_path / "cut" / "chat_template.jinja").read_text() == "{{ x }}"
    before, after = read_weights(source / "model.safetensors"), read_weights(tmp_path / "cut" / "model.safetensors")
    shape, rows = after.pop("model.embed_tokens.weight")
    assert shape == [7, WIDTH]
    assert rows == before.pop("model.embed_tokens.weight")[1][: 7 * WIDTH * 4]
    assert after == before


@pytest.mark.parametrize("ids", [3, 11])
def test_what_cannot_be_cut_is_refused(source: Path, tmp_path: Path, ids: int) -> None:
    with pytest.raises(ConfigError, match="cannot be cut"):
        cut_model(source, tmp_path / "cut", ids)
    assert not (tmp_path / "cut").exists()
