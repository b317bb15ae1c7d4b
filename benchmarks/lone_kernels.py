"""The kernels of a step timed alone, on the GPU at hand: all matrix products of a model, and its attention.

What a mixed step is held against: nothing that serves requests can take less than these two.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

MATRIX_ROWS = (1, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512)
"""Tokens of the steps whose products are timed."""
APPENDED = (0, 15, 31, 63, 95, 127, 191, 255, 511)
CONTEXTS = (2048, 4096, 8192, 12288)
SPLITS = (0, 1, 4, 8, 16, 32)
"""Of those whose attention is timed, each with each."""
_LAYERS_HELD = 4
"""Layers whose weights are really there: more than any cache holds, and they take turns."""
_PAGE = 16
_WARM_UPS = 2
_REPLAYS = 7
"""The first of which is left out."""


class ModelShape(msgspec.Struct, frozen=True, rename={"layers": "num_hidden_layers", "heads": "num_attention_heads"}):
    """What a model's configuration says of its layers."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Inner and outer size of each product of a layer."""
        return [
            (self.hidden_size, (self.heads + 2 * self.num_key_value_heads) * self.head_dim),
            (self.heads * self.head_dim, self.hidden_size),
            (self.hidden_size, 2 * self.intermediate_size),
            (self.intermediate_size, self.hidden_size),
        ]


def model_shape(model: Path) -> ModelShape:
    """The shape of the model in a folder."""
    return msgspec.json.decode((model / "config.json").read_bytes(), type=ModelShape)


class LoneKernel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One timing."""

    what: str
    """"matrices" or "attention"."""
    rows: int
    """Tokens of the step."""
    context: int = 0
    """Of attention: behind which the decode is, and the appended tokens."""
    splits: int = 0
    """Most parts that keys are split into (FA3); 0: its own choice, without a bound."""
    ms: float
    """Of all layers together; median of replays as one CUDA graph."""


def lone_kernels(shape: ModelShape) -> Iterator[LoneKernel]:
    """Matrices and attention of a model by themselves; the device's memory is given back."""
    import torch

    yield from matrices(shape, MATRIX_ROWS)
    torch.cuda.empty_cache()
    yield from attention(shape, APPENDED, CONTEXTS, SPLITS)
    torch.cuda.empty_cache()


def matrices(shape: ModelShape, rows: Sequence[int]) -> Iterator[LoneKernel]:
    """Time the products of all layers, and of the output layer for two tokens, for steps of so many rows."""
    import torch

    torch.manual_seed(0)

    def weight(inner: int, outer: int) -> Any:
        return torch.empty(outer, inner, dtype=torch.bfloat16, device="cuda").uniform_(-0.035, 0.035)

    layers = [[weight(*size) for size in shape.matrices] for _ in range(_LAYERS_HELD)]
    head = weight(shape.hidden_size, shape.vocab_size)
    for count in rows:
        step = _products(shape, layers, head, count)
        yield LoneKernel(what="matrices", rows=count, ms=_median_ms(step))


def _products(shape: ModelShape, layers: Sequence[Sequence[Any]], head: Any, rows: int) -> Callable[[], None]:
    import torch

    inputs = [torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda") for inner, _ in shape.matrices]

    def step() -> None:
        for at in range(shape.layers):
            for given, matrix in zip(inputs, layers[at % _LAYERS_HELD], strict=True):
                torch.nn.functional.linear(given, matrix)
        torch.nn.functional.linear(inputs[0][:2], head)

    return step


def attention(
    shape: ModelShape, tokens: Sequence[int], contexts: Sequence[int], splits: Sequence[int]
) -> Iterator[LoneKernel]:
    """Time the attention of a decode and `tokens` appended ones, both behind `context` tokens, over all layers."""
    import torch

    pages = (max(contexts) + max(tokens)) // _PAGE + 2
    size = (2, 2 * pages, _PAGE, shape.num_key_value_heads, shape.head_dim)
    caches = [torch.randn(*size, dtype=torch.bfloat16, device="cuda") for _ in range(_LAYERS_HELD)]
    table = torch.randperm(2 * pages, device="cuda").to(torch.int32).view(2, pages)
    for context, count, split in itertools.product(contexts, tokens, splits):
        step = _attention_step(shape, caches, table, context, count, split)
        yield LoneKernel(what="attention", rows=1 + count, context=context, splits=split, ms=_median_ms(step))


def _attention_step(
    shape: ModelShape, caches: Sequence[Any], table: Any, context: int, appended: int, splits: int
) -> Callable[[], None]:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    requests = 2 if appended else 1
    queries = torch.randn(1 + appended, shape.heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(queries)
    seen = torch.tensor([context + 1, context + appended][:requests], dtype=torch.int32, device="cuda")
    common = {
        "cu_seqlens_q": torch.tensor([0, 1, 1 + appended][: requests + 1], dtype=torch.int32, device="cuda"),
        "max_seqlen_q": max(1, appended),
        "max_seqlen_k": int(seen.max()),
        "causal": True,
        "num_splits": splits,
    }
    plan = get_scheduler_metadata(
        batch_size=requests,
        num_heads_q=shape.heads,
        num_heads_kv=shape.num_key_value_heads,
        headdim=shape.head_dim,
        cache_seqlens=seen,
        qkv_dtype=torch.bfloat16,
        page_size=_PAGE,
        window_size=(-1, -1),
        **common,
    )

    def step() -> None:
        for at in range(shape.layers):
            keys, values = caches[at % _LAYERS_HELD]
            flash_attn_varlen_func(
                q=queries,
                k=keys,
                v=values,
                out=out,
                seqused_k=seen,
                softmax_scale=shape.head_dim**-0.5,
                block_table=table[:requests],
                scheduler_metadata=plan,
                fa_version=3,
                **common,
            )

    return step


def _median_ms(step: Callable[[], None]) -> float:
    """Of replays of the step as one graph."""
    import torch

    for _ in range(_WARM_UPS):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[float] = []
    for _ in range(_REPLAYS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    return statistics.median(times[1:])
