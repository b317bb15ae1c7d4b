"""What a worker is told to run a hop: made from a chain's record, which is only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pingpong_bus.chain import Part, RenderedMessage, raw_parts, rendered_messages
from pingpong_bus.messages import (
    ChunkSettings,
    DecodePace,
    HopSegment,
    HopSpec,
    JoinedPrompt,
    Literals,
    OutputSource,
    Resume,
    Sampling,
    StreamRef,
    StreamSegment,
)
from pingpongd.chain_record import ChainRecord
from pingpongd.config import DaemonConfig, DecodeFirstConfig

_ANY_RATIO = 1e6
"""Where a chain gives its target in milliseconds, no multiple of the decode step is to be tighter."""


def hop_spec(
    record: ChainRecord,
    index: int,
    stream_of: Callable[[int], StreamRef],
    config: DaemonConfig,
    sources: Mapping[int, OutputSource] = MappingProxyType({}),
) -> HopSpec:
    """Everything a worker has to know of an agent's next hop.

    Args:
        record: its chain.
        index: the agent.
        stream_of: the token log of an agent, with the endpoint that rings for it.
        config: the daemon's: its chunks, where the submission asks for no others, and how it paces decodes.
        sources: of a prompt that is joined as text, how its upstream logs become text; see `seams.output_sources`.
    """
    agent, prompt, known = record.chain.agents[index], record.prepared[index], record.agents[index]
    segments: list[HopSegment] = []
    for segment in prompt.segments:
        if isinstance(segment, Literals):
            segments.append(segment)
        else:
            expected = record.chain.agents[segment.agent].most
            segments.append(StreamSegment(stream=stream_of(segment.agent), expected=expected))
    text = _joined_prompt(record, index, stream_of, sources)
    append_tokens = record.options.append_tokens
    written = len(known.output_ids)
    return HopSpec(
        hop=known.hop,
        output=stream_of(index),
        segments=segments,
        sampling=Sampling(
            max_tokens=agent.max_tokens,
            temperature=agent.temperature,
            top_p=agent.top_p,
            seed=agent.seed,
            stop=agent.stop,
            stop_token_ids=agent.stop_token_ids,
            ignore_eos=agent.ignore_eos,
        ),
        joined=text if prompt.joined or prompt.text else None,
        # The same for all hops of an agent: one that is resumed may find what the one before has computed.
        cache_salt=f"{record.id}/{index}" if record.options.isolate else None,
        # Ids that were appended may have to be taken back, which a streaming-input session cannot.
        session="prefix-cache" if prompt.text else record.options.session,
        chunks=config.chunks if append_tokens is None else ChunkSettings(append_tokens=append_tokens),
        resume=Resume(tokens=written, text_chars=known.text_chars) if written else None,
        match=text,
        pace=decode_pace(record, index, config.decode_first),
        grid=record.job.exact.grid,
        replay=record.job.exact.level != "fast",
    )


def decode_pace(record: ChainRecord, index: int, paces: DecodeFirstConfig) -> DecodePace:
    """How much appends of others may slow an agent's decoding: less where no other agent reads it: a user does.

    Args:
        record: its chain.
        index: the agent.
        paces: the daemon's, as multiples of a decode step; a target of the chain's, in ms, stands in for `final`.
    """
    inner = any(index in reads for reads in record.state.upstreams)
    target_ms = record.chain.itl_target_ms
    if target_ms is None:
        return DecodePace(itl_ratio=paces.inner if inner else paces.final)
    more = paces.inner / paces.final if inner else 1.0
    return DecodePace(itl_ratio=_ANY_RATIO, itl_target_ms=target_ms * more)


def _joined_prompt(
    record: ChainRecord, index: int, stream_of: Callable[[int], StreamRef], sources: Mapping[int, OutputSource]
) -> JoinedPrompt | None:
    """The agent's prompt as text; None for one given as ids."""
    agent = record.chain.agents[index]
    if agent.prompt_ids is not None:
        return None
    if agent.raw_prompt is not None:
        raw: list[Part] = raw_parts(record.chain, index, record.inputs)
        messages = [RenderedMessage("", raw)]  # type: ignore[arg-type]
    else:
        messages = rendered_messages(record.chain, index, record.inputs)
    reads, prompt = record.state.upstreams[index], record.prepared[index]
    return JoinedPrompt(
        agent=agent,
        messages=messages,
        outputs={at: stream_of(at) for at in reads},
        sources=dict(sources),
        expected={at: record.chain.agents[at].most for at in reads},
        ahead=prompt.text and not prompt.joined,
    )
