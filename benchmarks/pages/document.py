"""The whole page and the summary, put together from the rows. Pure; pictures are drawn only when called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from pages import engine_pictures, pictures
from pages.auto_section import auto
from pages.chain_sections import chains, overlap_on_one_gpu, tensor_parallel
from pages.engine_sections import decode_first, exactness_levels, overhead
from pages.finalize_section import finalize
from pages.groups_section import many_groups
from pages.load_sections import many_chains
from pages.machines import Setting, by_setting
from pages.markdown import NOTHING, number, table
from pages.pictures import Drawing
from pages.rows import Results
from pages.step_sections import mixed_steps
from pages.summary import AIMS, Figure, summarize

PAGE = "docs/benchmarks.md"
SUMMARY = "benchmarks/results/summary.json"
IMAGES = "docs/images"
INTRODUCTION = Path(__file__).with_name("introduction.md").read_text(encoding="utf-8")


class Part(msgspec.Struct, frozen=True):
    """One section of every machine's part of the page."""

    section: Callable[[Results], list[str]]
    picture: Callable[[Results], Drawing | None] | None = None
    name: str = ""
    """Of the picture's file, with the machine's behind it."""
    alternative: str = ""
    """What the picture shows, in words."""


PARTS = (
    Part(chains, pictures.saved, "saved", "What each placement saves against its baseline, by cell"),
    Part(overlap_on_one_gpu),
    Part(tensor_parallel),
    Part(many_chains, pictures.many_chains, "many-chains", "Mean end-to-end times of many chains, by side"),
    Part(auto, pictures.predicted, "predicted", "Predicted and actual end-to-end times"),
    Part(mixed_steps, engine_pictures.mixed_steps, "mixed-step", "What a step takes by appended tokens and context"),
    Part(finalize, engine_pictures.finalize, "finalize", "Stages from an upstream's last token to the next first one"),
    Part(decode_first, engine_pictures.decode_first, "decode-first", "What appends and decodes wait, by target"),
    Part(exactness_levels),
    Part(overhead),
    Part(many_groups, engine_pictures.many_groups, "many-groups", "What the supervisor uses, by number of groups"),
)


class Document(msgspec.Struct, frozen=True):
    """Files by their path in the repository."""

    texts: dict[str, str]
    pictures: dict[str, Drawing]


def document(results: Results) -> Document:
    """Everything that the rows give."""
    summary = summarize(results)
    lines = [*INTRODUCTION.splitlines(), "", *_in_short(summary)]
    drawn: dict[str, Drawing] = {}
    for setting, some in by_setting(results).items():
        part, its_pictures = _part(setting, some)
        lines += part
        drawn |= its_pictures
    return Document({PAGE: "\n".join(lines).rstrip() + "\n", SUMMARY: summary_json(summary)}, drawn)


def _in_short(summary: dict[str, Figure]) -> list[str]:
    body = [
        [
            f"`{name}`",
            number(figure.value, 2 if abs(figure.value or 0) >= 1.5 else 3),
            str(AIMS[name]),
            NOTHING if figure.value is None else "yes" if AIMS[name].reached(figure.value) else "**no**",
            figure.missing or figure.how,
        ]
        for name, figure in summary.items()
    ]
    lines = table(["figure", "value", "aim", "reached", "how"], body)
    lines[1] = "| --- | --: | --- | --- | --- |"
    return ["## In short", "", *lines]


def _part(setting: Setting, results: Results) -> tuple[list[str], dict[str, Drawing]]:
    lines: list[str] = []
    drawn: dict[str, Drawing] = {}
    for part in PARTS:
        section = part.section(results)
        lines += section
        picture = part.picture(results) if part.picture and section else None
        if picture is not None:
            name = f"{part.name}-{setting.slug}.svg"
            drawn[f"{IMAGES}/{name}"] = picture
            lines += [f"![{part.alternative}](images/{name})", ""]
    return ([f"## {setting.name}", "", *lines] if lines else []), drawn


def summary_json(summary: dict[str, Figure]) -> str:
    """The summary as JSON, each row's place on a line of its own."""
    blocks = []
    for name, figure in summary.items():
        fields = {key: value for key, value in msgspec.to_builtins(figure).items() if key != "missing" or value}
        origins = ",\n".join(f"      {json.dumps(origin)}" for origin in fields.pop("from"))
        lines = [f"    {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
        lines.insert(1, f'    "from": [\n{origins}\n    ]' if origins else '    "from": []')
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"
