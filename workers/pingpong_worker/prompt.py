"""Prompts: from a chain's texts to token ids, cut where outputs of earlier agents belong.

A prompt is tokenized part by part: the chat template's text with its control tokens, everything else without, so
that `<|im_end|>` in a user's text, an input or an output stays text. Outputs are not tokenized at all: their ids stand
in the prompt as they were sampled. So the ids may differ from those of the whole text tokenized at once, where a token
would have spanned two parts. Templates that cannot be cut are tokenized part by part too, by `PromptCodec.join`, once
the outputs are text; `PromptCodec.tokenize_whole` gives the ids of the text at once, for `prompt_token_match`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
from pingpong_bus.errors import ChainError, ConfigError
from pingpong_bus.messages import JoinedPrompt, Literals, OutputOf, PreparedAgent, Segment
from pingpong_bus.think_blocks import opens_block
from pingpong_worker.incremental_tokens import GrowingIds
from pingpong_worker.text import DecodeStream, TextCodec, WindowDecodeStream, decode_all

if TYPE_CHECKING:  # both come with an engine, and the simulated one needs neither
    from pingpong_worker.chat_template import ChatTemplate, Layout
    from pingpong_worker.prompt_tokenizer import PromptTokenizer


Outputs = Mapping[int, Sequence[int]] | Mapping[int, str]
"""Of agents, by index."""


class PromptCodec(TextCodec, Protocol):
    """What a worker asks of a model's tokenizer and chat template."""

    def prepare(
        self, chain: Chain, inputs: dict[str, str], limits_vocabulary: int, agents: Sequence[int] | None = None
    ) -> list[PreparedAgent]:
        """Render and tokenize prompts.

        Args:
            chain: validated.
            inputs: a value for each of the chain's inputs.
            limits_vocabulary: the engine takes ids below it.
            agents: whose, by index; None: all. Of a step there is none.

        Raises:
            ChainError: naming the field that cannot be made a prompt.
        """
        ...

    def join(self, joined: JoinedPrompt, outputs: Outputs) -> list[int]:
        """The ids of a prompt whose outputs are text like a user's: control tokens count in the template only.

        Args:
            joined: the prompt. Of a `raw_prompt`, its one message holds the parts that `raw_parts` gives.
            outputs: the whole output of every agent it reads, by index in the chain: text, or ids of this tokenizer.

        Raises:
            ChainError: the template refuses these texts.
        """
        ...

    def tokenize_whole(self, joined: JoinedPrompt, outputs: Outputs) -> list[int]:
        """The ids of the same text tokenized at once, as whoever has nothing but the text would do it.

        No borders of parts are kept, and control tokens count wherever the text spells them: never for an engine.
        Takes and raises what `join` does.
        """
        ...

    def parts(self, joined: JoinedPrompt) -> list[TextPart | OutputPart]:
        """A prompt's text as far as it is known without the outputs, with their places in it.

        Only of a prompt that can be cut (not `PreparedAgent.joined`). Raises what `join` does.
        """
        ...

    def tokenize(self, parts: Iterable[TextPart]) -> list[int]:
        """The ids of a whole prompt's text: neighbouring text of one kind at once."""
        ...

    def growing(self, *, control: bool, first: bool = False) -> GrowingIds:
        """Tokenizes a part of a prompt while its text comes: `control` text as the template's own, other text plain.

        Args:
            control: whether control tokens count in it.
            first: whether it begins the prompt.
        """
        ...


class Prompts:
    """The `PromptCodec` of a Hugging Face model.

    - `prompt` and `messages` are rendered by the chat template, with the generation prompt after them. A BOS stands
      where the template writes one, and nowhere else.
    - `raw_prompt` is the text as it is. Control tokens count in what the chain itself says there, since its author
      takes the template's place, and neither in input values nor in outputs. No BOS is added.
    - `prompt_ids` are passed through.

    Args:
        tokenizer: what transformers loads: a fast tokenizer, with or without a chat template.

    Raises:
        ConfigError: the tokenizer is not a fast one, or its chat template cannot be read.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "the model has no fast tokenizer (tokenizer.json).", field="model", hint="Choose a model that has one."
            )
        from pingpong_worker.prompt_tokenizer import PromptTokenizer

        self._tokenizer = PromptTokenizer(tokenizer.backend_tokenizer.to_str())
        self._template = _chat_template(tokenizer, self._tokenizer)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(parameters) - {"tools", "documents", "kwargs"} | {"messages"}
        """Variables of the template that are not the user's to set."""

    @classmethod
    def load(cls, model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Prompts:
        """Load a model's tokenizer.

        Args:
            model: a folder, or a name that transformers finds.
            revision: of a name; None for the main one.
            trust_remote_code: whether code that comes with the model may run.

        Raises:
            ConfigError: there is none, or none that can be used.
        """
        from transformers import AutoTokenizer  # takes seconds

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(model), revision=revision, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise ConfigError(
                f'the tokenizer of "{model}" cannot be loaded: {first_line}',
                field="model",
                hint="Give the name of a Hugging Face model, or a folder that holds one.",
            ) from error
        return cls(tokenizer)

    def prepare(
        self, chain: Chain, inputs: dict[str, str], limits_vocabulary: int, agents: Sequence[int] | None = None
    ) -> list[PreparedAgent]:
        """See `PromptCodec`."""
        wanted = range(len(chain.agents)) if agents is None else agents
        return [self._prepare(chain, index, inputs, limits_vocabulary) for index in wanted]

    def join(self, joined: JoinedPrompt, outputs: Outputs) -> list[int]:
        """See `PromptCodec`."""
        return self.tokenize(self._joined_parts(joined, outputs))

    def parts(self, joined: JoinedPrompt) -> list[TextPart | OutputPart]:
        """See `PromptCodec`."""
        if joined.agent.raw_prompt is not None:
            return list(joined.messages[0].parts)
        template = self._require_template(f'agent "{joined.agent.name}"')
        return template.lay_out(joined.messages, joined.agent.chat_template_kwargs).parts

    def tokenize(self, parts: Iterable[TextPart]) -> list[int]:
        """See `PromptCodec`."""
        segments = self._segments(merge_text(parts))
        return [token for segment in segments if isinstance(segment, Literals) for token in segment.ids]

    @property
    def obstacle(self) -> str:
        """Why text that outputs are joined with is not tokenized before they end, a clause; empty where it is."""
        return self._tokenizer.obstacle

    def growing(self, *, control: bool, first: bool = False) -> GrowingIds:
        """See `PromptCodec`."""
        return self._tokenizer.growing(control=control, first=first)

    def tokenize_whole(self, joined: JoinedPrompt, outputs: Outputs) -> list[int]:
        """See `PromptCodec`."""
        text = "".join(part.text for part in self._joined_parts(joined, outputs))
        return self._tokenizer.control(text, first=True)

    def decode_stream(self) -> DecodeStream:
        """See `TextCodec`."""
        return WindowDecodeStream(self._tokenizer.decode, self._tokenizer.silent)

    def encode_text(self, text: str) -> list[int]:
        """See `TextCodec`."""
        return self._tokenizer.plain(text)

    def _joined_parts(self, joined: JoinedPrompt, outputs: Outputs) -> list[TextPart]:
        """A prompt's parts with outputs as text."""
        texts: dict[int, str] = {}
        for agent, output in outputs.items():
            texts[agent] = output if isinstance(output, str) else decode_all(self.decode_stream(), output)

        def fill(part: TextPart | OutputPart) -> TextPart:
            return TextPart(texts[part.agent]) if isinstance(part, OutputPart) else part

        filled = [list(map(fill, message.parts)) for message in joined.messages]
        if joined.agent.raw_prompt is not None:
            return filled[0]
        template = self._require_template(f'agent "{joined.agent.name}"')
        messages = [
            RenderedMessage(message.role, list(parts)) for message, parts in zip(joined.messages, filled, strict=True)
        ]
        layout = template.lay_out(messages, joined.agent.chat_template_kwargs)
        return [part for part in layout.parts if isinstance(part, TextPart)]

    def _prepare(self, chain: Chain, index: int, inputs: dict[str, str], vocabulary: int) -> PreparedAgent:
        agent = chain.agents[index]
        if agent.is_step:
            return PreparedAgent(segments=[])
        check_ids(chain, index, vocabulary)
        note, opening = "", ""
        if agent.prompt_ids is not None:
            field = f"agents[{index}].prompt_ids"
            segments = self._segments(raw_parts(chain, index, inputs))
        elif agent.raw_prompt is not None:
            field = f"agents[{index}].raw_prompt"
            parts = raw_parts(chain, index, inputs)
            segments, opening = self._segments(parts), end_of(parts)
        else:
            field = f"agents[{index}].{'prompt' if agent.messages is None else 'messages'}"
            layout = self._lay_out(chain, index, inputs, field)
            segments, opening = self._segments(layout.parts), end_of(layout.parts)
            note = layout.obstacle if any(isinstance(segment, OutputOf) for segment in segments) else ""
        check_segments(segments, field)
        return PreparedAgent(segments=segments, joined=bool(note), note=note, thinking=opens_block(opening))

    def _lay_out(self, chain: Chain, index: int, inputs: dict[str, str], field: str) -> Layout:
        agent = chain.agents[index]
        template = self._require_template(field)
        for name, value in agent.chat_template_kwargs.items():
            variable = f"agents[{index}].chat_template_kwargs.{name}"
            if name in self._reserved:
                raise ChainError(
                    f'"{name}" is not a variable that a chain can set.', field=variable, hint="Leave it out."
                )
            if found := template.control_token_in(value):
                raise ChainError(
                    f'it holds "{found}", which would count as a control token.',
                    field=variable,
                    hint="Write it into a message, where it stays text.",
                )
        messages = rendered_messages(chain, index, inputs)
        if messages[-1].role == "assistant":
            raise ChainError(
                "the last message is the assistant's, whose turn comes after it.",
                field=field,
                hint="End with a message of role user, or write the whole prompt as raw_prompt.",
            )
        try:
            return template.lay_out(messages, agent.chat_template_kwargs)
        except ChainError as error:
            raise ChainError(error.message, field=field, hint=error.hint) from error

    def _require_template(self, field: str) -> ChatTemplate:
        if self._template is None:
            raise ChainError(
                "the model has no chat template.", field=field, hint="Write the prompt as raw_prompt, or as prompt_ids."
            )
        return self._template

    def _segments(self, parts: Iterable[Part]) -> list[Segment]:
        """Tokenize each part on its own; neighbouring ids become one segment."""
        segments: list[Segment] = []
        literal: list[int] = []
        for at, part in enumerate(parts):
            match part:
                case TextPart(text, control=True):
                    literal += self._tokenizer.control(text, first=at == 0)
                case TextPart(text):
                    literal += self._tokenizer.plain(text)
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


def prepare_ids(chain: Chain, limits_vocabulary: int, agents: Sequence[int] | None = None) -> list[PreparedAgent]:
    """Prepare a chain, or these agents of it, for a model without a tokenizer: prompts given as ids need none.

    Raises:
        ChainError: an agent has text or stop strings, or an id that the model does not know.
    """
    prepared: list[PreparedAgent] = []
    for index in range(len(chain.agents)) if agents is None else agents:
        agent = chain.agents[index]
        if agent.is_step:
            prepared.append(PreparedAgent(segments=[]))
            continue
        if agent.prompt_ids is None or agent.stop:
            raise ChainError(
                "the model has no tokenizer, so text means nothing to it.",
                field=f"agents[{index}].{'stop' if agent.stop else 'prompt'}",
                hint="Give prompts as prompt_ids and stops as stop_token_ids.",
            )
        check_ids(chain, index, limits_vocabulary)
        segments: list[Segment] = []
        for part in raw_parts(chain, index, {}):
            if isinstance(part, OutputPart):
                segments.append(OutputOf(agent=part.agent))
            elif isinstance(part, IdsPart):
                segments.append(Literals(ids=part.ids))
        prepared.append(PreparedAgent(segments=segments))
    return prepared


def end_of(parts: Sequence[Part]) -> str:
    """The text of the template or the chain at a prompt's end; empty where something else ends it."""
    last = parts[-1] if parts else None
    return last.text if isinstance(last, TextPart) and last.control else ""


def check_ids(chain: Chain, index: int, limits_vocabulary: int) -> None:
    """Check an agent's `prompt_ids` and `stop_token_ids` against the vocabulary.

    Raises:
        ChainError: naming the first id that the engine does not know.
    """
    agent = chain.agents[index]
    for field, items in (("prompt_ids", agent.prompt_ids or []), ("stop_token_ids", agent.stop_token_ids)):
        for at, item in enumerate(items):
            if isinstance(item, int) and item >= limits_vocabulary:
                raise ChainError(
                    f"{item} is no token of this model, whose vocabulary has {limits_vocabulary}.",
                    field=f"agents[{index}].{field}[{at}]",
                    hint="Tokenize with the model's own tokenizer.",
                )


def check_segments(segments: Sequence[Segment], field: str) -> None:
    """Raise ChainError, naming `field`, for a prompt of nothing at all."""
    if not segments:
        raise ChainError("the prompt has no tokens.", field=field, hint="Write what the agent shall do.")


def _chat_template(tokenizer: Any, tokens: PromptTokenizer) -> ChatTemplate | None:
    from jinja2 import TemplateSyntaxError

    from pingpong_worker.chat_template import ChatTemplate

    if not tokenizer.chat_template:
        return None
    variants = tokenizer.chat_template
    source = "".join(variants.values()) if isinstance(variants, dict) else variants

    def render(messages: list[dict[str, str]], kwargs: Mapping[str, Any]) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
        return text

    try:
        return ChatTemplate(render, source, tokens.control_tokens, tokens.shown_tokens)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the model's chat template cannot be read: {error}.", field="model", hint="Choose another model."
        ) from error
