"""The text that a step takes: its own, its chain's inputs, and what other agents have written. Pure."""

from __future__ import annotations

from pingpong_bus.chain import TextPart, text_parts
from pingpong_bus.think_blocks import without_blocks
from pingpongd.chain_record import ChainRecord


def step_text(record: ChainRecord, index: int) -> str:
    """A step's input; all that it reads has been written."""
    parts = text_parts(record.chain, record.chain.agents[index].input or "", record.inputs)
    return "".join(part.text if isinstance(part, TextPart) else read_text(record, part.agent) for part in parts)


def read_text(record: ChainRecord, index: int) -> str:
    """An agent's output as others read it: without the blocks that it is stripped of."""
    text = "".join(record.agents[index].text)
    if record.chain.agents[index].strip is None:
        return text
    return without_blocks(text, inside=record.prepared[index].thinking)
