"""Engine figures for tests: those of an H200 with a model of Qwen3-14B's shape in bfloat16, and variations of them."""

from __future__ import annotations

from pingpong_bus.messages import BesideFigure, EngineFigures

H200 = EngineFigures(
    measured_at="2026-11-01T00:00:00+00:00",
    prefill=[(64, 12.0), (512, 32.0), (2048, 101.0), (4352, 206.0), (8192, 407.0), (12544, 656.0), (16640, 902.0)],
    finalize=[(4096, 8, 14.0), (4096, 64, 15.0), (12288, 8, 17.0), (12288, 64, 21.0)],
    decode=[(4096, 8.6), (12288, 8.95)],
    batch=[(2, 8.7), (4, 8.9), (8, 9.3)],
    beside=[
        BesideFigure(context=2048, tokens=4096, append_ms=422.0, decode_ms=10.3, itl_ratio=1.2),
        BesideFigure(context=10240, tokens=4096, append_ms=900.0, decode_ms=10.7, itl_ratio=1.2),
    ],
)
"""One GPU: what rides beside decodes is 100 tokens a step at 4k of context, and 49 at 12k."""


def scaled(figures: EngineFigures, prefill: float, decode: float) -> EngineFigures:
    """Figures of an engine that takes so many times as long for prompts and for tokens."""
    return EngineFigures(
        measured_at=figures.measured_at,
        prefill=[(tokens, ms * prefill) for tokens, ms in figures.prefill],
        finalize=[(cached, tokens, ms * decode) for cached, tokens, ms in figures.finalize],
        decode=[(context, ms * decode) for context, ms in figures.decode],
        batch=[(rows, ms * decode) for rows, ms in figures.batch],
        beside=[
            BesideFigure(
                context=figure.context,
                tokens=figure.tokens,
                append_ms=figure.append_ms * decode,
                decode_ms=figure.decode_ms * decode,
                itl_ratio=figure.itl_ratio,
            )
            for figure in figures.beside
        ],
    )


PAIR = scaled(H200, 0.55, 0.66)
"""Two of them as one tensor-parallel engine."""
