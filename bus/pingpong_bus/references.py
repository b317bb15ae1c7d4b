"""References between agents: what stands in double braces in a chain's strings, and the parts it cuts them into.

A string may hold references::

    {{writer}}          the output of the earlier agent "writer"
    {{input.topic}}     the value of the chain's input "topic"
    \\{{                 two literal braces (in a JSON file the backslash is doubled)

Braces that open and are neither of these are an error, not text. Input values are never scanned for references.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pingpong_bus.chain import Agent, Chain

INPUT_PREFIX = "input."
_REFERENCE = re.compile(r"\\\{\{|\{\{\s*([^{}]*?)\s*\}\}")


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Text with nothing left to replace."""

    text: str
    control: bool = False
    """Whether control tokens written in it count as such: true for the own text of a `raw_prompt`, and for a chat
    template's; never for input values and outputs."""


class OutputPart(msgspec.Struct, frozen=True, tag="output"):
    """The output of the agent at `agent`, an index into the chain's agents."""

    agent: int


class IdsPart(msgspec.Struct, frozen=True, tag="ids"):
    """Token ids as they are."""

    ids: list[int]


Part = TextPart | OutputPart | IdsPart


class RenderedMessage(msgspec.Struct, frozen=True):
    """A message whose inputs are filled in and whose references are resolved to agents."""

    role: str
    parts: list[TextPart | OutputPart]


def texts_of(agent: Agent) -> Iterator[tuple[str, str]]:
    """Every string of an agent that may hold references, with the path of its field."""
    if agent.system is not None:
        yield "system", agent.system
    if agent.prompt is not None:
        yield "prompt", agent.prompt
    for at, message in enumerate(agent.messages or []):
        yield f"messages[{at}].content", message.content
    if agent.raw_prompt is not None:
        yield "raw_prompt", agent.raw_prompt
    if agent.input is not None:
        yield "input", agent.input
    for at, item in enumerate(agent.prompt_ids or []):
        if isinstance(item, str):
            yield f"prompt_ids[{at}]", item


def expanded_length(text: str, inputs: Mapping[str, int]) -> int:
    """Characters of a template string with its inputs filled in.

    Args:
        text: the string.
        inputs: the length of each input's value, by name.
    """
    length = len(text)
    for match in _REFERENCE.finditer(text):
        reference = match.group(1)
        if reference is not None and reference.startswith(INPUT_PREFIX):
            length += inputs[reference.removeprefix(INPUT_PREFIX)] - len(match.group(0))
    return length


def references_in(text: str) -> Iterator[str]:
    """What stands between the braces of each reference."""
    for match in _REFERENCE.finditer(text):
        if match.group(1) is not None:
            yield match.group(1)


def has_stray_braces(text: str) -> bool:
    """Whether a "{{" opens no reference."""
    return "{{" in _REFERENCE.sub(" ", text)


def upstreams(chain: Chain, index: int) -> list[int]:
    """Indices of the agents whose output agent `index` reads, each once, in order of first mention."""
    positions = {agent.name: at for at, agent in enumerate(chain.agents)}
    found: list[int] = []
    for _, text in texts_of(chain.agents[index]):
        for reference in references_in(text):
            at = positions.get(reference)
            if at is not None and at not in found:
                found.append(at)
    return found


def rendered_messages(chain: Chain, index: int, inputs: Mapping[str, str]) -> list[RenderedMessage]:
    """The chat messages of an agent that has `prompt` or `messages`, inputs filled in."""
    agent = chain.agents[index]
    messages: list[tuple[str, str]]
    if agent.messages is not None:
        messages = [(message.role, message.content) for message in agent.messages]
    else:
        system = [("system", agent.system)] if agent.system is not None else []
        messages = [*system, ("user", agent.prompt or "")]
    return [RenderedMessage(role, text_parts(chain, content, inputs)) for role, content in messages]


def raw_parts(chain: Chain, index: int, inputs: Mapping[str, str]) -> list[Part]:
    """The parts of an agent that has `raw_prompt` or `prompt_ids`.

    Neighbouring ids come as one part; of a raw prompt, its own text and input values stay apart (`TextPart.control`).
    """
    agent = chain.agents[index]
    if agent.raw_prompt is not None:
        return list(merge_text(_split(chain, agent.raw_prompt, inputs)))
    parts: list[Part] = []
    run: list[int] = []
    for item in agent.prompt_ids or []:
        if isinstance(item, int):
            run.append(item)
            continue
        if run:
            parts.append(IdsPart(run))
            run = []
        parts.extend(text_parts(chain, item, inputs))
    if run:
        parts.append(IdsPart(run))
    return parts


def text_parts(chain: Chain, text: str, inputs: Mapping[str, str]) -> list[TextPart | OutputPart]:
    """Split a template string at its references; text and input values that touch become one part."""
    return merge_text(
        TextPart(part.text) if isinstance(part, TextPart) else part for part in _split(chain, text, inputs)
    )


def merge_text(parts: Iterable[TextPart | OutputPart]) -> list[TextPart | OutputPart]:
    """Join neighbouring text of one kind; empty text is dropped."""
    merged: list[TextPart | OutputPart] = []
    present = (part for part in parts if isinstance(part, OutputPart) or part.text)
    for control, run in groupby(present, key=lambda part: part.control if isinstance(part, TextPart) else None):
        if control is None:
            merged.extend(run)
        else:
            merged.append(TextPart("".join(part.text for part in run if isinstance(part, TextPart)), control))
    return merged


def _split(chain: Chain, text: str, inputs: Mapping[str, str]) -> Iterator[TextPart | OutputPart]:
    positions = {agent.name: at for at, agent in enumerate(chain.agents)}
    at = 0
    for match in _REFERENCE.finditer(text):
        yield TextPart(text[at : match.start()], control=True)
        at = match.end()
        reference = match.group(1)
        if reference is None:
            yield TextPart("{{", control=True)
        elif reference.startswith(INPUT_PREFIX):
            yield TextPart(inputs[reference.removeprefix(INPUT_PREFIX)])
        else:
            yield OutputPart(positions[reference])
    yield TextPart(text[at:], control=True)
