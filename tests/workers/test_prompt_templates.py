"""Prompts under chat templates in the styles of many models, with tokenizers of single bytes.

Such a tokenizer never joins letters, so that a prompt put together from parts must have exactly the ids of the
text that the template gives for the real outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pingpong_bus.chain import Agent, Chain, Message, RenderedMessage, raw_parts, rendered_messages, validate_chain
from pingpong_bus.errors import ChainError, ConfigError
from pingpong_bus.messages import JoinedPrompt, Literals, OutputOf, PreparedAgent
from pingpong_worker.prompt import Prompts

CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CONTROL += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
WORDS = ["<think>", "</think>"]
"""Added tokens that are shown, Qwen3's: control tokens like the others."""

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """{% for message in messages %}{% set content = '<|start_header_id|>' + message.role
 + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' %}{% if loop.first %}
{%- set content = '<s>' + content %}{% endif %}{{ content }}{% endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"""
GEMMA = """{{ '<s>' }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message.role %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set loop_messages = messages[1:] %}{%- else %}
{%- set loop_messages = messages %}{% endif %}{{- '<s>' }}{%- for message in loop_messages %}
{%- if message.role == 'user' %}{% if loop.first and system is defined %}
{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}{% else %}
{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}{% else %}
{{- ' ' + message.content + '</s>' }}{% endif %}{% endfor %}"""
QWEN3 = """{%- for message in messages %}{% set content = message.content %}{% if message.role == 'assistant' %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endfor %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""
SKIPS_EMPTY = """{% for message in messages %}{% if message.content %}{{ '<|im_start|>' + message.role
 + '\\n' + message.content + '<|im_end|>' }}{% endif %}{% endfor %}{{ '<|im_start|>assistant\\n' }}"""
REPEATS = """{% for message in messages %}{{ message.content + '<|im_end|>' + message.content }}{% endfor %}"""
SHOUTS = """{% for message in messages %}{{ '<|im_start|>' + message.content | upper + '<|im_end|>' }}{% endfor %}"""
REVERSES = (
    """{% for message in messages | reverse %}{{ '<|im_start|>' + message.content + '<|im_end|>' }}{% endfor %}"""
)
CUTS_SHORT = """{% for message in messages %}{{ '<|im_start|>' + message.content[:1000] + '<|im_end|>' }}{% endfor %}"""
LOOKS = """{% for message in messages %}{% if 'think' in message.content %}{{ '<think>' }}{% endif %}{{ '<|im_start|>'
 + message.content + '<|im_end|>' }}{% endfor %}"""
COMPARES = """{% for message in messages %}{% if message.content == 'none' %}{{ '<s>' }}{% endif %}{{ '<|im_start|>'
 + message.content + '<|im_end|>' }}{% endfor %}"""
STRIPS_LINES = (
    """{% for message in messages %}{{ '<|im_start|>' + message.content.strip('\\n') + '<|im_end|>' }}{% endfor %}"""
)

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "skips_empty": SKIPS_EMPTY,
    "repeats": REPEATS,
    "shouts": SHOUTS,
    "reverses": REVERSES,
    "cuts_short": CUTS_SHORT,
    "looks": LOOKS,
    "compares": COMPARES,
    "strips_lines": STRIPS_LINES,
}


@cache
def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a byte, and the control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROL)
    backend.add_tokens(WORDS)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@cache
def prompts(template: str | None) -> Prompts:
    return Prompts(tokenizer(template))


CONTROL_IDS = set(tokenizer(None).convert_tokens_to_ids([*CONTROL, *WORDS]))
VOCABULARY = len(tokenizer(None))


def chain_of(agent: Agent, inputs: Mapping[str, str] | None = None) -> Chain:
    """Two agents that write, and the one that is looked at."""
    writers = [Agent(name="one", prompt_ids=[1]), Agent(name="two", prompt_ids=[1])]
    chain = Chain(name="test", agents=[*writers, agent], inputs=dict(inputs or {}))
    validate_chain(chain)
    return chain


def prepare(template: str | None, agent: Agent, inputs: Mapping[str, str] | None = None) -> PreparedAgent:
    return prompts(template).prepare(chain_of(agent, inputs), dict(inputs or {}), VOCABULARY)[2]


def splice(prepared: PreparedAgent, outputs: Mapping[int, Sequence[int]]) -> list[int]:
    ids: list[int] = []
    for segment in prepared.segments:
        ids += segment.ids if isinstance(segment, Literals) else outputs[segment.agent]
    return ids


def join(template: str, agent: Agent, inputs: Mapping[str, str], outputs: Mapping[int, Sequence[int]]) -> list[int]:
    messages = rendered_messages(chain_of(agent, inputs), 2, inputs)
    return prompts(template).join(JoinedPrompt(agent=agent, messages=messages, outputs={}), outputs)


def rendering(template: str, agent: Agent, texts: Mapping[str, str]) -> str:
    """What the template says with the outputs and inputs in place, by plain substitution."""
    given_messages = agent.messages or [Message("user", agent.prompt or "")]
    messages = [
        {"role": m.role, "content": re.sub(r"\{\{(.*?)\}\}", lambda found: texts[found.group(1)], m.content)}
        for m in given_messages
    ]
    text = tokenizer(template).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **agent.chat_template_kwargs
    )
    assert isinstance(text, str)
    return text


def decode(ids: Sequence[int]) -> str:
    text = tokenizer(None).backend_tokenizer.decode(list(ids), skip_special_tokens=False)
    assert isinstance(text, str)
    return text


plain_text = st.text(st.sampled_from("ab \n\t<|é😀猫ش\N{REPLACEMENT CHARACTER}"), max_size=12)
evil_text = st.lists(st.one_of(plain_text, st.sampled_from([*CONTROL, *WORDS, "<|im_", "end|>"])), max_size=4).map(
    "".join
)
contents = st.lists(
    st.one_of(plain_text, st.sampled_from(["{{one}}", "{{two}}", "{{input.topic}}", "think", "<|im_end|>"])), max_size=4
).map("".join)
ROLES = {True: ("system", "user", "assistant", "user"), False: ("user", "assistant", "user")}


@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    first=contents,
    second=contents,
    system=st.booleans(),
    one=evil_text,
    two=evil_text,
    topic=evil_text,
)
@settings(deadline=None, max_examples=300)
def test_a_prompt_put_together_is_what_the_template_renders(
    template: str, first: str, second: str, system: bool, one: str, two: str, topic: str
) -> None:
    """The one property that matters, for all templates, texts and outputs."""
    source = TEMPLATES[template]
    roles = ROLES[system and template != "gemma"]
    texts = ["be brief", first, "ok", second][-len(roles) :]
    agent = Agent(name="three", messages=[Message(role, text) for role, text in zip(roles, texts, strict=True)])
    inputs = {"topic": topic}
    prepared = prepare(source, agent, inputs)
    outputs = {0: prompts(source).encode_text(one), 1: prompts(source).encode_text(two)}
    joined = join(source, agent, inputs, outputs)
    expected = rendering(source, agent, {"one": one, "two": two, "input.topic": topic})
    assert prepared.joined == bool(prepared.note)
    if template == "shouts":  # special tokens that are text are hidden from the template, and so do not change
        assert decode(joined).casefold() == expected.casefold()
    else:
        assert decode(joined) == expected
    # All control tokens are the template's own: as many as there are where no text spells one.
    tame = agent_with(agent, [harmless(text) for text in texts])
    alone = rendering(source, tame, {"one": harmless(one), "two": harmless(two), "input.topic": harmless(topic)})
    assert sum(token in CONTROL_IDS for token in joined) == sum(alone.count(token) for token in [*CONTROL, *WORDS])
    if not prepared.joined:
        assert splice(prepared, outputs) == joined


def harmless(text: str) -> str:
    return re.sub(r"[|\[]|s>|_of_turn|<(?=/?think)", "x", text)


def agent_with(agent: Agent, texts: Sequence[str]) -> Agent:
    assert agent.messages is not None
    messages = [Message(message.role, text) for message, text in zip(agent.messages, texts, strict=True)]
    return msgspec.structs.replace(agent, messages=messages)


def user(text: str, **more: Any) -> Agent:
    return Agent(name="three", prompt=text, **more)


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", "mistral", "qwen3", "skips_empty", "strips_lines"])
def test_outputs_between_words_are_spliced_as_ids(template: str) -> None:
    prepared = prepare(TEMPLATES[template], user("read {{one}} and {{two}}, then answer"))
    assert not prepared.joined
    assert [s.agent for s in prepared.segments if isinstance(s, OutputOf)] == [0, 1]
    odd = {0: [3, 1, 4], 1: [1, 5, 9]}  # ids that no tokenizer would give for their text
    assert "read " + decode([3, 1, 4]) + " and " + decode([1, 5, 9]) + ", then answer" in decode(splice(prepared, odd))


@pytest.mark.parametrize("text", [" read {{one}} it\n\n", "\tread {{one}} it", "read {{one}} it "])
@pytest.mark.parametrize("template", ["llama3", "gemma"])
def test_what_a_template_trims_of_the_chains_own_text_is_trimmed(template: str, text: str) -> None:
    prepared = prepare(TEMPLATES[template], user(text))
    assert not prepared.joined
    assert prepared == prepare(TEMPLATES[template], user("read {{one}} it"))


@pytest.mark.parametrize(
    ("template", "agent", "why"),
    [
        ("llama3", user("read {{one}}"), "trims"),
        ("gemma", user("{{one}} is it"), "trims"),
        ("gemma", user("  {{one}} is it"), "trims"),
        ("strips_lines", user("read {{one}}"), "white space"),
        ("skips_empty", user("{{one}}"), "empty"),
        ("repeats", user("a {{one}} b"), "repeats the text of a user message"),
        ("shouts", user("a {{one}} b"), "leaves out or changes the text of a user message"),
        ("cuts_short", user("a {{one}} b"), "long"),
        ("looks", user("a {{one}} b"), '"think"'),
        ("looks", user("think of {{one}} b"), "depends on what the messages say"),
        ("compares", user("{{one}}"), '"none"'),
        ("reverses", Agent(name="three", messages=[Message("system", "a"), Message("user", "b {{one}} c")]), "order"),
        (
            "qwen3",
            Agent(name="three", messages=[Message("assistant", "a {{one}} b"), Message("user", "go on")]),
            '"</think>"',
        ),
    ],
)
def test_a_template_that_cannot_be_cut_is_joined_and_says_why(template: str, agent: Agent, why: str) -> None:
    prepared = prepare(TEMPLATES[template], agent)
    assert prepared.joined
    assert why in prepared.note
    assert prepared.note.count(".") == 1
    bound = len(splice(prepared, {0: [1] * 1000}))
    assert bound >= len(join(TEMPLATES[template], agent, {}, {0: [1] * 1000}))


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"gemma"}))
def test_an_agent_that_reads_nothing_is_never_joined(template: str) -> None:
    agent = user(" think </think> <|im_end|>\n", system="\nShort ")
    prepared = prepare(TEMPLATES[template], agent)
    assert not prepared.joined
    assert len(prepared.segments) == 1
    assert splice(prepared, {}) == join(TEMPLATES[template], agent, {}, {})


def test_template_variables_are_passed_on() -> None:
    loud, quiet = (prepare(QWEN3, user("hi", chat_template_kwargs={"enable_thinking": on})) for on in (True, False))
    assert decode(splice(quiet, {})) == decode(splice(loud, {})) + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", ["tokenize", "messages", "chat_template", "add_generation_prompt", "conversation"])
def test_variables_of_the_renderer_are_refused(name: str) -> None:
    with pytest.raises(ChainError) as caught:
        prepare(CHATML, user("hi", chat_template_kwargs={name: True}))
    assert caught.value.field == f"agents[2].chat_template_kwargs.{name}"


def test_a_template_finds_the_shown_tokens_that_it_looks_for_in_messages() -> None:
    """Qwen3's takes the thoughts out of earlier answers; its own tokens count all the same, and a user's never do."""
    messages = [Message("user", "<think>?"), Message("assistant", "{{one}}"), Message("user", "go on</think>")]
    agent = Agent(name="three", messages=messages, chat_template_kwargs={"enable_thinking": False})
    opening, closing = tokenizer(None).convert_tokens_to_ids(WORDS)
    code = prompts(None).encode_text
    ids = join(QWEN3, agent, {}, {0: [opening, *code("secret"), closing, *code("\n\nanswer")]})
    text = decode(ids)
    assert "assistant\nanswer<|im_end|>" in text
    assert "secret" not in text
    assert "user\n<think>?<|im_end|>" in text
    assert (ids.count(opening), ids.count(closing)) == (1, 1), "of the empty thoughts that the template writes"


@pytest.mark.parametrize("value", ["a</s>b", ["x", {"text": "<think>"}], {"[INST]": 1}])
def test_template_variables_hold_no_control_token(value: object) -> None:
    with pytest.raises(ChainError, match="control token") as caught:
        prepare(CHATML, user("hi", chat_template_kwargs={"documents": value}))
    assert caught.value.field == "agents[2].chat_template_kwargs.documents"
    prepare(CHATML, user("hi", chat_template_kwargs={"documents": [{"text": "s> think", "at": 1, "on": None}]}))


def test_what_the_template_refuses_is_an_error_of_the_chain() -> None:
    with pytest.raises(ChainError, match="System role not supported") as caught:
        prepare(GEMMA, user("hi", system="be brief"))
    assert caught.value.field == "agents[2].prompt"
    with pytest.raises(ChainError, match="must alternate") as caught:
        prepare(GEMMA, Agent(name="three", messages=[Message("user", "a"), Message("user", "b {{one}}")]))
    assert caught.value.field == "agents[2].messages"


def test_a_template_with_a_fault_is_an_error_of_the_chain() -> None:
    with pytest.raises(ChainError, match="refuses this") as caught:
        prepare("{{ messages[7].content }}", user("hi"))
    assert caught.value.hint


def test_text_that_leaves_no_character_to_mark_with_is_refused() -> None:
    everything = "".join(map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))))
    assert not prepare(REPEATS, user(everything[1:])).joined
    with pytest.raises(ChainError, match="private character") as caught:
        prepare(REPEATS, user(everything))
    assert caught.value.field == "agents[2].prompt"


def test_a_template_that_is_no_template_is_an_error_of_the_model() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        prompts("{{ 'never closed }}")


def test_the_assistant_cannot_have_the_last_word() -> None:
    with pytest.raises(ChainError, match="last message is the assistant's") as caught:
        prepare(CHATML, Agent(name="three", messages=[Message("user", "hi"), Message("assistant", "I ")]))
    assert caught.value.field == "agents[2].messages"


def test_a_model_without_a_template_takes_raw_prompts() -> None:
    with pytest.raises(ChainError, match="no chat template") as caught:
        prepare(None, user("hi"))
    assert "raw_prompt" in caught.value.hint
    assert prepare(None, Agent(name="three", raw_prompt="hi {{one}}")).segments[-1] == OutputOf(agent=0)


def test_in_a_raw_prompt_the_control_tokens_of_its_own_text_count() -> None:
    agent = Agent(name="three", raw_prompt="<s>[INST]{{input.x}}</s>{{one}}[/INST]")
    prepared = prepare(None, agent, {"x": "[/INST]<s>"})
    first, output, last = prepared.segments
    assert isinstance(first, Literals)
    assert isinstance(last, Literals)
    assert output == OutputOf(agent=0)
    start, inst, end, close = tokenizer(None).convert_tokens_to_ids(["<s>", "[INST]", "</s>", "[/INST]"])
    assert first.ids == [start, inst, *prompts(None).encode_text("[/INST]<s>"), end]
    assert last.ids == [close]
    chain = chain_of(agent, {"x": ""})
    parts = raw_parts(chain, 2, {"x": "[/INST]<s>"})
    joined = JoinedPrompt(agent=agent, messages=[RenderedMessage("", parts)], outputs={})
    evil = prompts(None).encode_text("</s>")
    assert prompts(None).join(joined, {0: evil}) == splice(prepared, {0: evil})


def test_a_raw_prompt_that_comes_out_empty_is_refused() -> None:
    with pytest.raises(ChainError, match="no tokens") as caught:
        prepare(CHATML, Agent(name="three", raw_prompt="{{input.x}}"), {"x": ""})
    assert caught.value.field == "agents[2].raw_prompt"


def test_ids_pass_through_and_must_be_of_the_vocabulary() -> None:
    agent = Agent(name="three", prompt_ids=[5, VOCABULARY - 1, "{{two}}", 7])
    assert prepare(None, agent).segments == [Literals(ids=[5, VOCABULARY - 1]), OutputOf(agent=1), Literals(ids=[7])]
    with pytest.raises(ChainError) as caught:
        prepare(None, Agent(name="three", prompt_ids=["{{one}}", 5, VOCABULARY]))
    assert caught.value.field == "agents[2].prompt_ids[2]"
