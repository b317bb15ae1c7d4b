"""Turn the GGUF of the embedded model into a Hugging Face folder: ``python -m pingpong_worker.model_convert FILE OUT``.

A program of its own, so that the memory it takes (about 2 GB) goes back when it ends.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, out: Path) -> None:
    """Write config, bf16 safetensors, tokenizer and chat template of `gguf` into the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
