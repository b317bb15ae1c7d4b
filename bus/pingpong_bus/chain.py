"""chain.json: its structs, its validation and its schema.

Pure: values in, values out. The client checks a file with it before it looks for a daemon; the supervisor checks
again, for it trusts no client; workers read the structs to render prompts. What strings may hold is said in
`references`, whose public names can be had from here as well.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from pingpong_bus.errors import ChainError
from pingpong_bus.json_path import parse_path
from pingpong_bus.references import (
    INPUT_PREFIX,
    IdsPart,
    OutputPart,
    Part,
    RenderedMessage,
    TextPart,
    expanded_length,
    has_stray_braces,
    merge_text,
    raw_parts,
    references_in,
    rendered_messages,
    text_parts,
    texts_of,
    upstreams,
)

__all__ = [
    "MAX_CHAIN_BYTES",
    "Agent",
    "Chain",
    "Exactness",
    "Extract",
    "IdsPart",
    "Message",
    "ModelName",
    "Name",
    "OutputPart",
    "Part",
    "RenderedMessage",
    "TextPart",
    "TokenId",
    "json_schema",
    "merge_text",
    "parse_chain",
    "raw_parts",
    "rendered_messages",
    "resolve_inputs",
    "text_parts",
    "upstreams",
    "validate_chain",
]

MAX_CHAIN_BYTES = 16 * 1024 * 1024
"""A chain file larger than this is refused unread."""
MAX_PROMPT_CHARACTERS = 4 * 1024 * 1024
"""Of an agent's text with its inputs filled in: far more than any engine reads, and soon tokenized."""

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]{0,63}(?!\n)$"
"""Without the look-ahead, Python's ``$`` would let a line break at the end pass."""

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN, description="Letters, digits, _ and -; at most 64.")]
Exactness = Literal["fast", "grid", "invariant"]
"""What is promised of a chain's output: nothing; the same bits in every placement, by cutting prompts on a grid; the
same bits whatever it is batched with, by the engine's batch-invariant kernels."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=200, description="As the daemon's groups name it.")]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message; its content may hold references."""

    role: Literal["system", "user", "assistant"]
    content: str


class Extract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What an `extract` step takes out of its input; exactly one of `json`, `regex` and `fenced` is given."""

    json: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    """A path into the last JSON value of the text, such as "$.items[0].title"; a string comes without its quotes,
    anything else as JSON."""
    regex: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    """A Python regular expression: its first group where it has one, else all that it matches, at its first match."""
    fenced: Annotated[str, msgspec.Meta(max_length=40)] | None = None
    """The language of a fenced block, of which the last one's content is taken; "" for a block of any language."""
    otherwise: str | None = None
    """What is taken where there is nothing of the kind; null: the chain fails."""


class Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One step of a chain.

    Of an agent exactly one kind of prompt is given: `prompt` (a user message, with `system` before it if set),
    `messages`, `raw_prompt` (text as is, no chat template) or `prompt_ids` (token ids, and "{{agent}}" between them).

    A step between agents has `input` and one of `extract` and `call` instead; what comes of it is read like an
    agent's output.
    """

    name: Name
    model: ModelName | None = None
    """Which of the daemon's models runs it; null: the daemon's default model."""
    system: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    raw_prompt: str | None = None
    prompt_ids: list[TokenId | str] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1, description="The most tokens this agent writes.")] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10, description="0 is greedy.")] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: list[Annotated[str, msgspec.Meta(min_length=1)]] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    join: Literal["ids", "text"] = "ids"
    """How outputs of others enter its prompt: as the ids that were sampled, or as text, tokenized with what stands
    around it. Outputs of another tokenizer, stripped ones and those of steps are always joined as text."""
    strip: Literal["think"] | None = None
    """What other agents do not read of its output: "think" for <think>...</think> blocks."""
    speculate: bool | None = None
    """Whether its tokens may be guessed from its prompt and from earlier runs of the chain, and checked several a
    step; null: what the chain says."""
    input: str | None = None
    """Of a step: the text that it takes, with references."""
    extract: Extract | None = None
    """Of a step: what it takes out of its input."""
    call: Name | None = None
    """Of a step: which of the daemon's `[calls]` is given its input, and whose answer is its output."""
    max_chars: Annotated[int, msgspec.Meta(ge=1, le=4_194_304)] = 8192
    """Of a step: the most characters of its output; more fails the chain."""

    @property
    def is_step(self) -> bool:
        """Whether it is a step between agents, which no model runs."""
        return self.extract is not None or self.call is not None

    @property
    def most(self) -> int:
        """The most that its log may come to hold: tokens, or characters of a step."""
        return self.max_chars if self.is_step else self.max_tokens


class Chain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A submitted job: agents in order, each reading its own text and outputs of earlier ones."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    agents: Annotated[list[Agent], msgspec.Meta(min_length=1, max_length=1000)]
    description: str = ""
    inputs: dict[Name, str | None] = {}
    """Default values; null where a value has to be given with the submission."""
    start: Literal["first_token", "immediate"] = "first_token"
    """When read-ahead may begin: at the upstream's first token, which keeps its prefill free of company, or at once."""
    exactness: Exactness | None = None
    """None: the daemon's default."""
    itl_target_ms: Annotated[float, msgspec.Meta(gt=0, description="Of agents that no other reads.")] | None = None
    """How long a step may take in which an agent that no other reads decodes; inner ones may wait longer, by the
    daemon's `[decode_first]`. None: as a multiple of the decode step, from there."""
    speculate: bool | None = None
    """Of agents that do not say; null: what the submission says, else the daemon's `[speculation]`."""


def parse_chain(data: bytes, *, source: str = "chain") -> Chain:
    """Decode and check a chain file.

    Args:
        data: the file's bytes: JSON in UTF-8.
        source: what errors call the file.

    Raises:
        ChainError: naming the first field that is off.
    """
    if len(data) > MAX_CHAIN_BYTES:
        raise ChainError(f"{source} is larger than {MAX_CHAIN_BYTES} bytes.", hint="Put less text into one chain.")
    data = data.removeprefix(codecs.BOM_UTF8)  # some editors put it there
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ChainError(
            f"{source} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}.", hint="Save the file as UTF-8."
        ) from None
    try:
        chain = msgspec.json.decode(data, type=Chain)
    except msgspec.ValidationError as error:
        raise _explain(error, source) from None
    except RecursionError:
        raise ChainError(f"{source} is nested too deeply.", hint="A chain needs no more than a few levels.") from None
    except msgspec.DecodeError as error:
        raise ChainError(f"{source} is not JSON: {error}.", hint="Check it with `python -m json.tool FILE`.") from None
    validate_chain(chain)
    return chain


def validate_chain(chain: Chain) -> None:
    """Check what the structs alone cannot say.

    Raises:
        ChainError: naming the first field that is off.
    """
    seen: dict[str, int] = {}
    for index, agent in enumerate(chain.agents):
        where = f"agents[{index}]"
        if agent.name == "input":
            raise ChainError('"input" is reserved for inputs.', field=f"{where}.name", hint="Choose another name.")
        if agent.name in seen:
            raise ChainError(
                f'two agents are called "{agent.name}" (agents[{seen[agent.name]}] too).',
                field=f"{where}.name",
                hint="Give each agent a name of its own.",
            )
        if agent.is_step or agent.input is not None:
            _check_step(agent, where)
        else:
            _check_prompt_kind(agent, where)
        for field, text in texts_of(agent):
            _check_braces(text, f"{where}.{field}")
            for reference in references_in(text):
                _check_reference(reference, chain, seen, index, f"{where}.{field}")
        _check_template_kwargs(agent, where)
        if not agent.is_step and agent.max_chars != Agent(name=agent.name).max_chars:
            raise ChainError("max_chars is of steps.", field=f"{where}.max_chars", hint="Set max_tokens of an agent.")
        if agent.seed is not None and agent.temperature == 0:
            raise ChainError(
                "a seed has no effect at temperature 0.",
                field=f"{where}.seed",
                hint="Leave it out or set a temperature.",
            )
        seen[agent.name] = index
    if all(agent.is_step for agent in chain.agents):
        raise ChainError(
            "the chain has no agent, only steps.",
            field="agents",
            hint="Add an agent with a prompt for them to work on.",
        )


def resolve_inputs(chain: Chain, given: Mapping[str, str]) -> dict[str, str]:
    """Merge the values given with a submission into the chain's defaults.

    Raises:
        ChainError: an unknown input, one without a value, or too much text with all filled in.
    """
    for name in given:
        if name not in chain.inputs:
            known = ", ".join(chain.inputs) or "none"
            raise ChainError(f'the chain has no input "{name}".', field=f"inputs.{name}", hint=f"Its inputs: {known}.")
    merged: dict[str, str] = {}
    for name, default in chain.inputs.items():
        value = given.get(name, default)
        if value is None:
            raise ChainError(
                f'the input "{name}" has no value.', field=f"inputs.{name}", hint=f"Give it: --input {name}=VALUE."
            )
        merged[name] = value
    for index, agent in enumerate(chain.agents):
        sizes = {name: len(value) for name, value in merged.items()}
        size = sum(expanded_length(text, sizes) for _, text in texts_of(agent))
        if size > MAX_PROMPT_CHARACTERS:
            raise ChainError(
                f'with its inputs filled in, the prompt of agent "{agent.name}" has {size} characters, the limit is '
                f"{MAX_PROMPT_CHARACTERS}.",
                field=f"agents[{index}]",
                hint="Shorten the inputs, or refer to them less often.",
            )
    return merged


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of chain.json, generated from the structs."""
    schema = msgspec.json.schema(Chain)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://pingpongd.dev/schema/chain.json",
        "title": "pingpongd chain",
        **schema,
    }


def _check_prompt_kind(agent: Agent, where: str) -> None:
    kinds = [kind for kind in ("prompt", "messages", "raw_prompt", "prompt_ids") if getattr(agent, kind) is not None]
    if not kinds:
        raise ChainError(
            "the agent has no prompt.",
            field=f"{where}.prompt",
            hint="Give it one of prompt, messages, raw_prompt or prompt_ids.",
        )
    if len(kinds) > 1:
        raise ChainError(
            f"the agent has both {kinds[0]} and {kinds[1]}.", field=f"{where}.{kinds[1]}", hint="Keep one of them."
        )
    if agent.system is not None and kinds[0] != "prompt":
        raise ChainError(
            f"system goes with prompt, not with {kinds[0]}.",
            field=f"{where}.system",
            hint="Make it a message of role system, or a part of the text.",
        )
    if _is_empty(agent):
        raise ChainError("the prompt is empty.", field=f"{where}.{kinds[0]}", hint="Write what the agent shall do.")
    if kinds[0] in ("raw_prompt", "prompt_ids") and agent.chat_template_kwargs:
        raise ChainError(
            f"{kinds[0]} uses no chat template.", field=f"{where}.chat_template_kwargs", hint="Leave it out."
        )
    for at, item in enumerate(agent.prompt_ids or []):
        if isinstance(item, str) and not re.fullmatch(r"\{\{[^{}]+\}\}", item):
            raise ChainError(
                f"{item!r} is neither a token id nor one reference.",
                field=f"{where}.prompt_ids[{at}]",
                hint='Write ids as numbers and an output as "{{agent}}".',
            )
        if isinstance(item, str) and item.strip("{} ").startswith(INPUT_PREFIX):
            raise ChainError(
                "an input is text, and prompt_ids takes ids.",
                field=f"{where}.prompt_ids[{at}]",
                hint="Use raw_prompt for text.",
            )


_NOT_OF_STEPS = (
    "model",
    "system",
    "prompt",
    "messages",
    "raw_prompt",
    "prompt_ids",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "chat_template_kwargs",
    "join",
    "strip",
    "speculate",
)


def _check_step(agent: Agent, where: str) -> None:
    if not agent.is_step:
        raise ChainError(
            "an agent has a prompt; input is of steps.",
            field=f"{where}.input",
            hint='Call it prompt, or add "extract" or "call".',
        )
    if agent.extract is not None and agent.call is not None:
        raise ChainError("the step has both extract and call.", field=f"{where}.call", hint="Make it two steps.")
    if not agent.input:
        raise ChainError("the step has no input.", field=f"{where}.input", hint='Say what it takes, as "{{agent}}".')
    plain = Agent(name=agent.name)
    for field in _NOT_OF_STEPS:
        if getattr(agent, field) != getattr(plain, field):
            raise ChainError("a step has no model.", field=f"{where}.{field}", hint=f"Leave {field} out.")
    if agent.extract is not None:
        _check_extract(agent.extract, f"{where}.extract")
        if len(agent.extract.otherwise or "") > agent.max_chars:
            raise ChainError(
                f"it has {len(agent.extract.otherwise or '')} characters, and max_chars is {agent.max_chars}.",
                field=f"{where}.extract.otherwise",
                hint="Shorten it, or raise max_chars of the step.",
            )


def _check_extract(extract: Extract, where: str) -> None:
    kinds = [kind for kind in ("json", "regex", "fenced") if getattr(extract, kind) is not None]
    if len(kinds) != 1:
        raise ChainError(
            "extract takes exactly one of json, regex and fenced.",
            field=where if not kinds else f"{where}.{kinds[1]}",
            hint="Keep one of them; for more, let one step take the other's output.",
        )
    if extract.json is not None:
        try:
            parse_path(extract.json)
        except ValueError as error:
            raise ChainError(
                f"the path is none: {error}.", field=f"{where}.json", hint='Such as "$.items[0].title".'
            ) from None
    if extract.fenced is not None and extract.fenced.split() != [extract.fenced] and extract.fenced:
        raise ChainError(
            "a fenced block is known by its first word alone.",
            field=f"{where}.fenced",
            hint='One word, such as "python", or "" for a block of any language.',
        )
    if extract.regex is not None:
        try:
            re.compile(extract.regex)
        except (re.error, RecursionError, OverflowError) as error:
            raise ChainError(
                f"the regular expression is not one: {error}.", field=f"{where}.regex", hint="See Python's re."
            ) from None


def _is_empty(agent: Agent) -> bool:
    if agent.prompt is not None:
        return not agent.prompt.strip()
    if agent.messages is not None:
        return not any(message.content.strip() for message in agent.messages)
    return not (agent.raw_prompt or agent.prompt_ids)


def _check_template_kwargs(agent: Agent, where: str) -> None:
    """They may be any JSON, but they have to travel: msgpack takes integers of 64 bits and 512 levels or so."""
    try:
        msgspec.msgpack.encode(agent.chat_template_kwargs)
    except (OverflowError, RecursionError) as error:
        raise ChainError(
            f"the values cannot be sent: {error}.", field=f"{where}.chat_template_kwargs", hint="Use plain values."
        ) from None


def _check_braces(text: str, field: str) -> None:
    if has_stray_braces(text):
        raise ChainError(
            'there is a "{{" that opens no reference.',
            field=field,
            hint='Close it as in "{{agent}}", or write \\\\{{ in JSON for literal braces.',
        )


def _check_reference(reference: str, chain: Chain, seen: Mapping[str, int], index: int, field: str) -> None:
    if reference.startswith(INPUT_PREFIX):
        name = reference.removeprefix(INPUT_PREFIX)
        if name not in chain.inputs:
            known = ", ".join(f"input.{known}" for known in chain.inputs) or "none"
            raise ChainError(
                f'"{{{{{reference}}}}}" names no input of the chain.',
                field=field,
                hint=f'Declare it under "inputs"; there are: {known}.',
            )
        return
    if reference in seen:
        if field.rpartition(".")[2].startswith("prompt_ids") and chain.agents[seen[reference]].is_step:
            raise ChainError(
                f'"{reference}" is a step, whose output is text, and prompt_ids takes ids.',
                field=field,
                hint="Use raw_prompt for text.",
            )
        return
    if reference == chain.agents[index].name:
        raise ChainError(
            f'the agent "{reference}" reads its own output, which is a cycle.',
            field=field,
            hint="Refer to earlier agents only.",
        )
    later = {agent.name: at for at, agent in enumerate(chain.agents)}
    if reference in later:
        raise ChainError(
            f'"{{{{{reference}}}}}" names agents[{later[reference]}], which comes later.',
            field=field,
            hint="Put the agent that is read before the one that reads it; two that read each other are a cycle.",
        )
    known = ", ".join(seen) or "none"
    raise ChainError(
        f'"{{{{{reference}}}}}" names no agent.',
        field=field,
        hint=f"Earlier agents: {known}. For literal braces write \\\\{{{{ in JSON.",
    )


_PATH = re.compile(r" - at `\$\.?(.*?)(?:\[\.\.\.\])?`$")
_KEY_PATH = re.compile(r" - at `key` in `\$\.?(.*)`$")


_WORDS = {
    "role": ("system", "user", "assistant"),
    "join": ("ids", "text"),
    "strip": ("think",),
    "start": ("first_token", "immediate"),
}
"""What fields take that are one of a few words."""


def _explain(error: msgspec.ValidationError, source: str) -> ChainError:
    """Turn msgspec's sentence, "Expected `int` >= 1 - at `$.agents[0].max_tokens`", into ours."""
    text = str(error)
    match = _PATH.search(text)
    field = match.group(1) if match else ""
    problem = _PATH.sub("", text)
    if found := _KEY_PATH.search(text):
        return ChainError("a name is not letters, digits, _ and -.", field=found.group(1), hint="Rename it.")
    if found := re.match(r"Object contains unknown field `(.*)`", problem):
        field = f"{field}.{found.group(1)}" if field else found.group(1)
        return ChainError(
            "there is no such field.", field=field, hint="See `pingpong-client schema` for those there are."
        )
    if found := re.match(r"Object missing required field `(.*)`", problem):
        field = f"{field}.{found.group(1)}" if field else found.group(1)
        return ChainError("the field is missing.", field=field, hint="Add it.")
    if field.endswith("].name") and "matching regex" in problem:
        return ChainError("the name is not 1 to 64 letters, digits, _ and -.", field=field, hint="Rename the agent.")
    if re.match(r"Expected `array` of length >= 1", problem):
        return ChainError("the list is empty.", field=field, hint="A chain has at least one agent.")
    if field == "exactness":
        levels = ", ".join(get_args(Exactness))
        return ChainError("there is no such level.", field=field, hint=f"Choose from {levels}.")
    words = _WORDS.get(field.rpartition(".")[2], ())
    if words and problem.startswith("Invalid enum value"):
        there = ", ".join(f'"{word}"' for word in words)
        said = problem.removeprefix("Invalid enum value ")
        return ChainError(f"there is no {said}.", field=field, hint=f"There is: {there}.")
    problem = f"{problem[:1].lower()}{problem[1:]}."
    return ChainError(problem if field else f"{source}: {problem}", field=field, hint="See `pingpong-client schema`.")
