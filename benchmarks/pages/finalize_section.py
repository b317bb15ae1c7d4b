"""The account of a downstream agent's first token, as Markdown."""

from __future__ import annotations

from pages.engine_sections import source
from pages.finalizes import accounts, stage_names
from pages.markdown import NOTHING, number, opened, table
from pages.rows import Results, rows


def finalize(results: Results) -> list[str]:
    """TTFT of a downstream agent in decode steps, and its stages."""
    if not results.finalizes:
        return []
    found = accounts(rows(results.finalizes))
    lines = opened(
        "From an upstream's last token to its downstream's first",
        "Two agents, caches empty before each run, daemon and engines traced. *Ratio* is TTFT ÷ the decode step "
        "of the same run; *late appends* are runs in which an append was in flight when the upstream ended. Medians; "
        f"those of the stages do not add up to the median of all exactly. {source(results.finalizes)}",
    )
    header = ["placement, session, P", "runs", "late appends", "TTFT, ms", "p90, ms", "decode step, ms", "ratio"]
    lines += table(
        header,
        [
            [
                one.name,
                str(one.runs),
                str(one.gave_up),
                number(one.ttft_ms, 2),
                number(one.ttft_p90_ms, 2),
                number(one.step_ms, 2),
                number(one.ratio, 2),
            ]
            for one in found
        ],
    )
    names = stage_names(one.stages_ms for one in found)
    lines += table(
        ["stages, ms", *(one.name for one in found)],
        [
            [name, *(number(one.stages_ms[name], 2) if name in one.stages_ms else NOTHING for one in found)]
            for name in names
        ],
    )
    return lines
