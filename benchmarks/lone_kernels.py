"""The kernels of a step timed alone, on the GPU at hand: all matrix products of a model, and its attention.

What a mixed step is held against: nothing that serves requests can take less than these two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

_LAYERS_HELD = 4
"""Layers whose weights are really there: more than any cache holds, and they take turns."""
_PAGE = 16


class ModelShape(msgspec.Struct, frozen=True, rename={"layers": "num_hidden_layers", "heads": "num_attention_heads"}):
    """What a model's configuration says of its layers."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


class LoneKernel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of a results file: one timing."""

    what: str
    """"matrices" or "attention"."""
    rows: int
    """Tokens of the step."""
    context: int = 0
    decode_context: int = 0
    splits: int = 0
    """Most parts that keys are split into (FA3); 0: its own choice, without a bound."""
    ms: float
    """Of all layers together."""


def matrices(shape: ModelShape, rows: Sequence[int]) -> Iterator[LoneKernel]:
    """Time the products of all layers, for steps of so many rows."""
    import torch

    torch.manual_seed(0)
    sizes = [
        (shape.hidden_size, (shape.heads + 2 * shape.num_key_value_heads) * shape.head_dim),
        (shape.heads * shape.head_dim, shape.hidden_size),
        (shape.hidden_size, 2 * shape.intermediate_size),
        (shape.intermediate_size, shape.hidden_size),
    ]

    def weight(inner: int, outer: int) -> Any:
        return torch.empty(outer, inner, dtype=torch.bfloat16, device="cuda").uniform_(-0.035, 0.035)

    held = [[weight(*size) for size in sizes] for _ in range(_LAYERS_HELD)]
    head = weight(shape.hidden_size, shape.vocab_size)
    for count in rows:
        inputs = [torch.randn(count, inner, dtype=torch.bfloat16, device="cuda") for inner, _ in sizes]
        last = inputs[0][:2]

        def step(inputs: list[Any] = inputs, last: Any = last) -> None:
            for layer in range(shape.layers):
                for given, matrix in zip(inputs, held[layer % _LAYERS_HELD], strict=True):
                    torch.nn.functional.linear(given, matrix)
            torch.nn.functional.linear(last, head)

        yield LoneKernel(what="matrices", rows=count, ms=_time(step))


def attention(
    shape: ModelShape, tokens: Sequence[int], contexts: Sequence[int], splits: Sequence[int]
) -> Iterator[LoneKernel]:
    """Time the attention of a decode and `tokens` appended ones, both behind `context` tokens, over all layers."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    pages = (max(contexts) + max(tokens)) // _PAGE + 2
    cache = [
        torch.randn(2, 2 * pages, _PAGE, shape.num_key_value_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        for _ in range(_LAYERS_HELD)
    ]
    table = torch.randperm(2 * pages, device="cuda").to(torch.int32).view(2, pages)
    for context in contexts:
        for count in tokens:
            queries = torch.randn(1 + count, shape.heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
            out = torch.empty_like(queries)
            requests = 2 if count else 1
            ends = torch.tensor([0, 1, 1 + count][: requests + 1], dtype=torch.int32, device="cuda")
            seen = torch.tensor([context + 1, context + count][:requests], dtype=torch.int32, device="cuda")
            longest, most = max(1, count), int(seen.max())
            for split in splits:
                metadata = get_scheduler_metadata(
                    batch_size=requests,
                    max_seqlen_q=longest,
                    max_seqlen_k=most,
                    num_heads_q=shape.heads,
                    num_heads_kv=shape.num_key_value_heads,
                    headdim=shape.head_dim,
                    cache_seqlens=seen,
                    qkv_dtype=torch.bfloat16,
                    cu_seqlens_q=ends,
                    page_size=_PAGE,
                    causal=True,
                    window_size=(-1, -1),
                    num_splits=split,
                )

                def step(
                    queries: Any = queries,
                    out: Any = out,
                    ends: Any = ends,
                    seen: Any = seen,
                    longest: int = longest,
                    most: int = most,
                    metadata: Any = metadata,
                    split: int = split,
                    requests: int = requests,
                ) -> None:
                    for layer in range(shape.layers):
                        keys, values = cache[layer % _LAYERS_HELD]
                        flash_attn_varlen_func(
                            q=queries,
                            k=keys,
                            v=values,
                            out=out,
                            cu_seqlens_q=ends,
                            max_seqlen_q=longest,
                            seqused_k=seen,
                            max_seqlen_k=most,
                            softmax_scale=shape.head_dim**-0.5,
                            causal=True,
                            block_table=table[:requests],
                            scheduler_metadata=metadata,
                            fa_version=3,
                            num_splits=split,
                        )

                yield LoneKernel(
                    what="attention",
                    rows=1 + count,
                    context=context,
                    decode_context=context,
                    splits=split,
                    ms=_time(step),
                )


def _time(step: Callable[[], None]) -> float:
    """Median ms of replays of the step as one graph."""
    import torch

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(7):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    return statistics.median(times[1:])
