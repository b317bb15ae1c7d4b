"""Tokenizers small enough for tests: bytes of UTF-8 are ids, and two ids mark a message's begin and end.

The model `PAIRS` has a second tokenizer: there two small letters that stand together in a word are one id, so that what
a text's ids are hangs on what stands beside it, as with real tokenizers.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from pingpong_bus.chain import (
    Chain,
    IdsPart,
    OutputPart,
    Part,
    RenderedMessage,
    TextPart,
    merge_text,
    raw_parts,
    rendered_messages,
)
from pingpong_bus.messages import JoinedPrompt, Literals, OutputOf, PreparedAgent, Segment
from pingpong_bus.think_blocks import opens_block
from pingpong_worker.incremental_tokens import GrowingIds, PieceByPiece
from pingpong_worker.prompt import Outputs, check_ids, check_segments, end_of
from pingpong_worker.simulated_request import EOS

BEGIN = 256
"""`<|im_start|>`; `EOS` is `<|im_end|>`."""
PAIRS = "simulated-pairs"
"""The model with the second tokenizer."""
FIRST_PAIR = 300
"""The id of "aa" there; "ab" is the next one, and "zz" the 676th."""

_CONTROL = {"<|im_start|>": BEGIN, "<|im_end|>": EOS}
_CONTROL_TOKEN = re.compile("|".join(map(re.escape, _CONTROL)))
_LETTERS = 26
_WORD = re.compile(r"[a-z]+")
_TAIL = re.compile(r"[a-z]*\Z")


def simulated_prompts(model: str) -> SimulatedPrompts:
    """The prompts of a simulated engine that is given this model."""
    return PairPrompts() if model == PAIRS else SimulatedPrompts()


class SimulatedDecodeStream:
    """Decodes one answer; ids that are no bytes, and no pairs, give no text."""

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

    tokenizer = "simulated bytes"
    """See `EngineLimits.tokenizer`."""

    def decode_stream(self) -> SimulatedDecodeStream:
        """A stream for one answer."""
        return SimulatedDecodeStream()

    def encode_text(self, text: str) -> list[int]:
        """The bytes of its UTF-8."""
        return list(text.encode())

    def prepare(
        self, chain: Chain, inputs: dict[str, str], limits_vocabulary: int, agents: Sequence[int] | None = None
    ) -> list[PreparedAgent]:
        """Render and tokenize prompts; the template is ChatML's."""
        wanted = range(len(chain.agents)) if agents is None else agents
        return [self._prepare(chain, index, inputs, limits_vocabulary) for index in wanted]

    def join(self, joined: JoinedPrompt, outputs: Outputs) -> list[int]:
        """The prompt as text: outputs are decoded and encoded again, with what stands beside them."""
        return self.tokenize(self._filled(joined, outputs))

    def tokenize_whole(self, joined: JoinedPrompt, outputs: Outputs) -> list[int]:
        """The ids of the same text at once, but that no text spells a control token."""
        ids: list[int] = []
        plain = ""
        for part in self._filled(joined, outputs):
            pieces = _control_pieces(part.text) if part.control else [part.text]
            for piece in pieces:
                if isinstance(piece, str):
                    plain += piece
                else:
                    ids += [*self.encode_text(plain), piece]
                    plain = ""
        return ids + self.encode_text(plain)

    def parts(self, joined: JoinedPrompt) -> list[TextPart | OutputPart]:
        """See `PromptCodec`."""
        if joined.agent.raw_prompt is not None:
            return _plain(joined.messages[0].parts)
        return _chat(joined.messages)

    def growing(self, *, control: bool, first: bool = False) -> GrowingIds:  # noqa: ARG002
        """See `PromptCodec`; control text always comes whole."""
        return PieceByPiece(self._control if control else self.encode_text)

    def _control(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _control_pieces(text):
            ids += self.encode_text(piece) if isinstance(piece, str) else [piece]
        return ids

    def tokenize(self, parts: Iterable[TextPart]) -> list[int]:
        """See `PromptCodec`."""
        ids: list[int] = []
        for part in merge_text(parts):
            assert isinstance(part, TextPart)  # noqa: S101 - nothing else went in
            ids += self._control(part.text) if part.control else self.encode_text(part.text)
        return ids

    def _filled(self, joined: JoinedPrompt, outputs: Outputs) -> list[TextPart]:
        """The prompt's parts with outputs as text."""
        found = []
        for part in self.parts(joined):
            if isinstance(part, TextPart):
                found.append(part)
                continue
            output = outputs[part.agent]
            found.append(TextPart(output if isinstance(output, str) else _to_bytes(output).decode("utf-8", "replace")))
        return found

    def _prepare(self, chain: Chain, index: int, inputs: dict[str, str], vocabulary: int) -> PreparedAgent:
        agent = chain.agents[index]
        if agent.is_step:
            return PreparedAgent(segments=[])
        check_ids(chain, index, vocabulary)
        if agent.raw_prompt is None and agent.prompt_ids is None:
            return PreparedAgent(segments=self._segments(_chat(rendered_messages(chain, index, inputs))))
        raw = raw_parts(chain, index, inputs)
        segments = self._segments(raw if agent.raw_prompt is None else _plain(raw))
        check_segments(segments, f"agents[{index}].{'prompt_ids' if agent.raw_prompt is None else 'raw_prompt'}")
        return PreparedAgent(segments=segments, thinking=opens_block(end_of(raw)))

    def _segments(self, parts: Sequence[Part]) -> list[Segment]:
        segments: list[Segment] = []
        literal: list[int] = []
        for part in parts:
            match part:
                case TextPart(text, control=control):
                    literal += self._control(text) if control else self.encode_text(text)
                case IdsPart(ids):
                    literal += ids
                case OutputPart(agent):
                    if literal:
                        segments.append(Literals(ids=literal))
                        literal = []
                    segments.append(OutputOf(agent=agent))
        if literal:
            segments.append(Literals(ids=literal))
        return segments


class PairPrompts(SimulatedPrompts):
    """The second tokenizer: of each word's small letters, the first and the second are one id, and so on."""

    tokenizer = "simulated pairs"

    def encode_text(self, text: str) -> list[int]:
        """Pairs, and the bytes of all else."""
        ids: list[int] = []
        at = 0
        for word in _WORD.finditer(text):
            ids += text[at : word.start()].encode()
            at = word.end()
            letters = word.group()
            for first, second in zip(letters[::2], letters[1::2], strict=False):
                ids.append(FIRST_PAIR + (ord(first) - ord("a")) * _LETTERS + ord(second) - ord("a"))
            if len(letters) % 2:
                ids.append(ord(letters[-1]))
        return [*ids, *text[at:].encode()]

    def growing(self, *, control: bool, first: bool = False) -> GrowingIds:
        """See `PromptCodec`."""
        return super().growing(control=True, first=first) if control else _GrowingPairs(self)


class _GrowingPairs:
    """Keeps back a letter that the next one may make a pair with."""

    def __init__(self, prompts: PairPrompts) -> None:
        self._prompts = prompts
        self._letter = ""

    @property
    def waiting(self) -> int:
        """See `GrowingIds`."""
        return len(self._letter)

    def feed(self, text: str) -> list[int]:
        """See `GrowingIds`."""
        text = self._letter + text
        tail = _TAIL.search(text)
        odd = tail is not None and len(tail.group()) % 2
        self._letter = text[-1:] if odd else ""
        return self._prompts.encode_text(text[:-1] if odd else text)

    def finish(self) -> list[int]:
        """See `GrowingIds`."""
        letter, self._letter = self._letter, ""
        return self._prompts.encode_text(letter)


def _chat(messages: Sequence[RenderedMessage]) -> list[TextPart | OutputPart]:
    parts: list[TextPart | OutputPart] = []
    for message in messages:
        parts += [TextPart(f"<|im_start|>{message.role}\n", control=True), *message.parts]
        parts.append(TextPart("<|im_end|>\n", control=True))
    return merge_text([*parts, TextPart("<|im_start|>assistant\n", control=True)])


def _plain(parts: Iterable[Part]) -> list[TextPart | OutputPart]:
    """The parts of a raw prompt: here, control tokens never count in one."""
    return merge_text(TextPart(part.text) if isinstance(part, TextPart) else part for part in parts)  # type: ignore[misc]


def _control_pieces(text: str) -> Iterable[str | int]:
    """Text, and the ids of the control tokens in it."""
    at = 0
    for found in _CONTROL_TOKEN.finditer(text):
        yield text[at : found.start()]
        yield _CONTROL[found.group()]
        at = found.end()
    yield text[at:]


def _to_bytes(ids: Sequence[int]) -> bytes:
    found = bytearray()
    for token in ids:
        if token < BEGIN:
            found.append(token)
        elif FIRST_PAIR <= token < FIRST_PAIR + _LETTERS * _LETTERS:
            found += bytes(ord("a") + letter for letter in divmod(token - FIRST_PAIR, _LETTERS))
    return bytes(found)
