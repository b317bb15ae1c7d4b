"""A tokenizer small enough for tests: bytes of UTF-8 are ids, and two ids mark a message's begin and end."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from pingpong_bus.chain import Chain, IdsPart, OutputPart, Part, RenderedMessage, TextPart, raw_parts, rendered_messages
from pingpong_bus.messages import JoinedPrompt, Literals, OutputOf, PreparedAgent, Segment
from pingpong_worker.prompt import check_ids, check_segments
from pingpong_worker.simulated_request import EOS

BEGIN = 256
"""`<|im_start|>`; `EOS` is `<|im_end|>`."""


class SimulatedDecodeStream:
    """Decodes one answer; ids that are no bytes give no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """Whether the last bytes are an incomplete character."""
        return bool(self._decoder.getstate()[0])

    def step(self, ids: Sequence[int]) -> str:
        """The text that these further ids add."""
        return self._decoder.decode(_to_bytes(ids))

    def finish(self) -> str:
        """What was held back."""
        return self._decoder.decode(b"", final=True)


class SimulatedPrompts:
    """Speaks the `PromptCodec` protocol."""

    def decode_stream(self) -> SimulatedDecodeStream:
        """A stream for one answer."""
        return SimulatedDecodeStream()

    def encode_text(self, text: str) -> list[int]:
        """The bytes of its UTF-8."""
        return list(text.encode())

    def prepare(
        self,
        chain: Chain,
        inputs: dict[str, str],
        limits_vocabulary: int,
        agents: Sequence[int] | None = None,
    ) -> list[PreparedAgent]:
        """Render and tokenize prompts; the template is ChatML's."""
        wanted = range(len(chain.agents)) if agents is None else agents
        return [self._prepare(chain, index, inputs, limits_vocabulary) for index in wanted]

    def join(self, joined: JoinedPrompt, outputs: Mapping[int, Sequence[int]]) -> list[int]:
        """The prompt as one text: outputs are decoded and encoded again."""
        if joined.agent.raw_prompt is not None:
            segments = self._raw(joined.messages[0].parts)
        else:
            segments = self._chat(joined.messages)
        ids: list[int] = []
        for segment in segments:
            match segment:
                case Literals(ids=literal):
                    ids.extend(literal)
                case OutputOf(agent=agent):
                    ids.extend(self.encode_text(_to_bytes(outputs[agent]).decode("utf-8", "replace")))
        return ids

    def tokenize_whole(self, joined: JoinedPrompt, outputs: Mapping[int, Sequence[int]]) -> list[int]:
        """The same ids: no token spans two bytes, and no text spells a control token."""
        return self.join(joined, outputs)

    def _prepare(self, chain: Chain, index: int, inputs: dict[str, str], vocabulary: int) -> PreparedAgent:
        agent = chain.agents[index]
        check_ids(chain, index, vocabulary)
        if agent.raw_prompt is None and agent.prompt_ids is None:
            return PreparedAgent(segments=self._chat(rendered_messages(chain, index, inputs)))
        segments = self._raw(raw_parts(chain, index, inputs))
        check_segments(segments, f"agents[{index}].{'prompt_ids' if agent.raw_prompt is None else 'raw_prompt'}")
        return PreparedAgent(segments=segments)

    def _raw(self, parts: Sequence[Part]) -> list[Segment]:
        segments: list[Segment] = []
        for part in parts:
            match part:
                case TextPart(text):
                    if text:
                        segments.append(Literals(ids=self.encode_text(text)))
                case OutputPart(agent):
                    segments.append(OutputOf(agent=agent))
                case IdsPart(ids):
                    segments.append(Literals(ids=ids))
        return segments

    def _chat(self, messages: Sequence[RenderedMessage]) -> list[Segment]:
        segments: list[Segment] = []
        literal: list[int] = []
        for message in messages:
            literal += [BEGIN, *self.encode_text(f"{message.role}\n")]
            for part in message.parts:
                if isinstance(part, TextPart):
                    literal += self.encode_text(part.text)
                else:
                    segments += [Literals(ids=literal), OutputOf(agent=part.agent)]
                    literal = []
            literal += [EOS, *self.encode_text("\n")]
        literal += [BEGIN, *self.encode_text("assistant\n")]
        return [*segments, Literals(ids=literal)]


def _to_bytes(ids: Sequence[int]) -> bytes:
    return bytes(token for token in ids if token < 256)
