"""Makes a second model out of one: the same layers behind a smaller vocabulary, and so another tokenizer.

A chain over two models of different tokenizers is to be tried on machines that reach no model hub. Ids from `ids` on
are left out, with the merges that make them: texts then take more and shorter tokens, which the model knows, too.

``python -m pingpong_worker.model_cut SOURCE TARGET [IDS]``
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from pingpong_bus.errors import ConfigError

_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors with a row for each id."""
_PIECE_BYTES = 1 << 24


def cut_model(source: Path, target: Path, ids: int) -> None:
    """Write the cut model.

    Args:
        source: a folder with a byte-level BPE tokenizer and one file of weights.
        target: a folder, which is made.
        ids: how many are kept.

    Raises:
        ConfigError: the model is not of this kind.
    """
    tokenizer = _cut_tokenizer(json.loads((source / "tokenizer.json").read_bytes()), ids)
    config = json.loads((source / "config.json").read_bytes())
    if config["vocab_size"] < ids:
        raise _unfit(f"it has {config['vocab_size']} ids, and {ids} are to be kept")
    target.mkdir()
    for file in source.iterdir():
        if file.name not in ("tokenizer.json", "config.json", "model.safetensors"):
            shutil.copyfile(file, target / file.name)
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": ids}, indent=2), encoding="utf-8")
    _cut_weights(source / "model.safetensors", target / "model.safetensors", ids)


def _cut_tokenizer(tokenizer: dict[str, Any], ids: int) -> dict[str, Any]:
    model = tokenizer["model"]
    if (
        model["type"] != "BPE"
        or model["byte_fallback"]
        or any(token["id"] >= ids for token in tokenizer["added_tokens"])
    ):
        raise _unfit("its tokenizer is no byte-level BPE with its added tokens in front")
    vocabulary = {token: at for token, at in model["vocab"].items() if at < ids}
    if any(token not in vocabulary for token in model["vocab"] if len(token) == 1):
        raise _unfit("single bytes of its tokenizer stand behind the ids that are to be kept")
    merges = []
    for merge in model["merges"]:
        first, second = merge if isinstance(merge, list) else merge.split(" ")
        if first + second in vocabulary and first in vocabulary and second in vocabulary:
            merges.append(merge)
    return tokenizer | {"model": model | {"vocab": vocabulary, "merges": merges}}


def _cut_weights(source: Path, target: Path, ids: int) -> None:
    """A safetensors file is the length of its header in 8 bytes, the header in JSON, and the tensors' bytes."""
    with source.open("rb") as file, target.open("wb") as out:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        tensors = sorted(
            ((name, entry) for name, entry in header.items() if name != "__metadata__"),
            key=lambda item: item[1]["data_offsets"][0],
        )
        at, kept, sources = 0, {name: entry for name, entry in header.items() if name == "__metadata__"}, []
        for name, entry in tensors:
            begin, end = entry["data_offsets"]
            shape = list(entry["shape"])
            if name in _TABLES:
                end = begin + (end - begin) // shape[0] * ids
                shape[0] = ids
            kept[name] = entry | {"shape": shape, "data_offsets": [at, at + end - begin]}
            sources.append((begin, end - begin))
            at += end - begin
        if not any(name in kept for name in _TABLES):
            raise _unfit("its embeddings have another name")
        data = json.dumps(kept, separators=(",", ":")).encode()
        data += b" " * (-len(data) % 8)
        out.write(len(data).to_bytes(8, "little") + data)
        for begin, size in sources:
            file.seek(8 + length + begin)
            while size:
                piece = file.read(min(size, _PIECE_BYTES))
                if not piece:
                    raise _unfit("its weights are cut off")
                out.write(piece)
                size -= len(piece)


def _unfit(why: str) -> ConfigError:
    return ConfigError(f"the model cannot be cut: {why}.", field="model", hint="Take the embedded model.")


if __name__ == "__main__":
    cut_model(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 20_000)
