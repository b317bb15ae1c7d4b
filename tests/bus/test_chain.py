"""chain.json: every way it can be off gets one sentence with the field; what is right is read as it was meant."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.chain import (
    MAX_CHAIN_BYTES,
    Agent,
    Chain,
    IdsPart,
    OutputPart,
    TextPart,
    json_schema,
    parse_chain,
    raw_parts,
    rendered_messages,
    resolve_inputs,
    text_parts,
    upstreams,
    validate_chain,
)
from pingpong_bus.errors import ChainError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.json"))


def agent(**fields: Any) -> dict[str, Any]:
    return {"name": "writer", "prompt": "Write.", **fields}


def chain(*agents: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"name": "test", "agents": list(agents) or [agent()], **fields}).encode()


def without(field: str, **fields: Any) -> dict[str, Any]:
    return {key: value for key, value in agent(**fields).items() if key != field}


BAD_CHAINS: dict[str, tuple[bytes, str, str]] = {
    # what is off: (file, field that the error names, a part of its sentence)
    "unknown field": (chain(colour="red"), "colour", "no such field"),
    "unknown field of an agent": (chain(agent(promt="x")), "agents[0].promt", "no such field"),
    "unknown field of a message": (
        chain(without("prompt", messages=[{"role": "user", "content": "x", "name": "y"}])),
        "agents[0].messages[0].name",
        "no such field",
    ),
    "no name": (json.dumps({"agents": [agent()]}).encode(), "name", "missing"),
    "no agents field": (b'{"name": "test"}', "agents", "missing"),
    "no name of an agent": (chain(without("name")), "agents[0].name", "missing"),
    "no agents": (b'{"name": "test", "agents": []}', "agents", "empty"),
    "agents of another type": (b'{"name": "test", "agents": {}}', "agents", "expected `array`"),
    "too many agents": (chain(*(agent(name=f"a{at}") for at in range(1001))), "agents", "<= 1000"),
    "empty chain name": (b'{"name": "", "agents": [{"name": "a", "prompt": "x"}]}', "name", ">= 1"),
    "duplicate names": (chain(agent(), agent()), "agents[1].name", "two agents"),
    "reserved name": (chain(agent(name="input")), "agents[0].name", "reserved"),
    "name with a space": (chain(agent(name="a b")), "agents[0].name", "letters, digits"),
    "name with a line break": (chain(agent(name="a\n")), "agents[0].name", "letters, digits"),
    "name too long": (chain(agent(name="a" * 65)), "agents[0].name", "letters, digits"),
    "later reference": (
        chain(agent(prompt="{{b}}"), agent(name="b")),
        "agents[0].prompt",
        "names agents[1], which comes later",
    ),
    "own output": (chain(agent(prompt="Go on: {{writer}}")), "agents[0].prompt", "cycle"),
    "cycle of two": (
        chain(agent(name="a", prompt="{{b}}"), agent(name="b", prompt="{{a}}")),
        "agents[0].prompt",
        "cycle",
    ),
    "unknown agent": (chain(agent(prompt="{{nobody}}")), "agents[0].prompt", "names no agent"),
    "unknown agent in a message": (
        chain(without("prompt", messages=[{"role": "user", "content": "{{nobody}}"}])),
        "agents[0].messages[0].content",
        "names no agent",
    ),
    "unknown agent in system": (chain(agent(system="{{nobody}}")), "agents[0].system", "names no agent"),
    "unknown agent in ids": (chain(without("prompt", prompt_ids=["{{x}}"])), "agents[0].prompt_ids[0]", "no agent"),
    "empty reference": (chain(agent(prompt="{{ }}")), "agents[0].prompt", "names no agent"),
    "unclosed reference": (chain(agent(prompt="{{writer}")), "agents[0].prompt", "opens no reference"),
    "unknown input": (chain(agent(prompt="{{input.topic}}")), "agents[0].prompt", "no input"),
    "no prompt": (chain(without("prompt")), "agents[0].prompt", "no prompt"),
    "two prompts": (chain(agent(raw_prompt="x")), "agents[0].raw_prompt", "both"),
    "empty prompt": (chain(agent(prompt="")), "agents[0].prompt", "empty"),
    "blank prompt": (chain(agent(prompt=" \n")), "agents[0].prompt", "empty"),
    "empty raw prompt": (chain(without("prompt", raw_prompt="")), "agents[0].raw_prompt", "empty"),
    "empty ids": (chain(without("prompt", prompt_ids=[])), "agents[0].prompt_ids", "empty"),
    "no messages": (chain(without("prompt", messages=[])), "agents[0].messages", "empty"),
    "blank messages": (
        chain(without("prompt", messages=[{"role": "user", "content": ""}])),
        "agents[0].messages",
        "empty",
    ),
    "unknown role": (
        chain(without("prompt", messages=[{"role": "tool", "content": "x"}])),
        "agents[0].messages[0].role",
        "'tool'",
    ),
    "system beside raw": (chain(without("prompt", raw_prompt="x", system="y")), "agents[0].system", "not with"),
    "template beside raw": (
        chain(without("prompt", raw_prompt="x", chat_template_kwargs={"a": 1})),
        "agents[0].chat_template_kwargs",
        "no chat template",
    ),
    "text in ids": (chain(without("prompt", prompt_ids=["word"])), "agents[0].prompt_ids[0]", "neither"),
    "escape in ids": (chain(without("prompt", prompt_ids=["\\{{a}}"])), "agents[0].prompt_ids[0]", "neither"),
    "input in ids": (
        chain(without("prompt", prompt_ids=["{{ input.a }}"]), inputs={"a": "x"}),
        "agents[0].prompt_ids[0]",
        "input is text",
    ),
    "negative id": (chain(without("prompt", prompt_ids=[-1])), "agents[0].prompt_ids[0]", ">= 0"),
    "id beyond 32 bits": (chain(without("prompt", prompt_ids=[2**32])), "agents[0].prompt_ids[0]", "<="),
    "boolean id": (chain(without("prompt", prompt_ids=[True])), "agents[0].prompt_ids[0]", "bool"),
    "zero max_tokens": (chain(agent(max_tokens=0)), "agents[0].max_tokens", ">= 1"),
    "negative max_tokens": (chain(agent(max_tokens=-3)), "agents[0].max_tokens", ">= 1"),
    "fractional max_tokens": (chain(agent(max_tokens=1.5)), "agents[0].max_tokens", "expected `int`"),
    "huge max_tokens": (chain(agent(max_tokens=10**30)), "agents[0].max_tokens", "<="),
    "negative temperature": (chain(agent(temperature=-0.1)), "agents[0].temperature", ">= 0"),
    "zero top_p": (chain(agent(top_p=0)), "agents[0].top_p", "> 0"),
    "top_p above 1": (chain(agent(top_p=1.1)), "agents[0].top_p", "<= 1"),
    "seed of a greedy agent": (chain(agent(seed=1)), "agents[0].seed", "no effect"),
    "empty stop string": (chain(agent(stop=[""])), "agents[0].stop[0]", ">= 1"),
    "values that cannot travel": (
        chain(agent(chat_template_kwargs={"a": 2**70})),
        "agents[0].chat_template_kwargs",
        "cannot be sent",
    ),
    "input name with a space": (chain(inputs={"a b": "x"}), "inputs", "letters, digits"),
    "input that is no text": (chain(inputs={"a": 3}), "inputs", "expected `str | null`"),
    "unknown start": (chain(start="later"), "start", "'later'"),
    "unknown join": (chain(agent(join="words")), "agents[0].join", 'There is: "ids", "text".'),
    "unknown strip": (chain(agent(strip="thoughts")), "agents[0].strip", "there is no 'thoughts'"),
    "max_chars of an agent": (chain(agent(max_chars=5)), "agents[0].max_chars", "of steps"),
    "two words of a fenced block": (
        chain(agent(), {"name": "s", "input": "x", "extract": {"fenced": "c d"}}),
        "agents[1].extract.fenced",
        "first word",
    ),
    "otherwise too long": (
        chain(agent(), {"name": "s", "input": "x", "extract": {"regex": "a", "otherwise": "long"}, "max_chars": 3}),
        "agents[1].extract.otherwise",
        "max_chars is 3",
    ),
    "a list": (b"[]", "", "got `array`"),
    "null": (b"null", "", "got `null`"),
    "nothing": (b"", "", "not JSON"),
    "not JSON": (b"{name: test}", "", "not JSON"),
    "NaN": (b'{"name": NaN}', "", "not JSON"),
    "two documents": (chain() + chain(), "", "not JSON"),
    "not UTF-8": (chain().replace(b"Write", b"Wr\xffte"), "", "not UTF-8: byte"),
    "UTF-16": (chain().decode().encode("utf-16"), "", "not UTF-8"),
    "too deep": (chain(agent()).replace(b'"Write."', b"[" * 100_000), "agents[0].prompt", "expected `str | null`"),
    "deep values": (
        b'{"name":"n","agents":[{"name":"a","prompt":"x","chat_template_kwargs":{"a":' + b"[" * 100_000,
        "",
        "nested too deeply",
    ),
    "too large": (b" " * (MAX_CHAIN_BYTES + 1), "", "is larger than 16777216 bytes"),
}


@pytest.mark.parametrize("name", BAD_CHAINS)
def test_bad_chain_gets_one_sentence_with_its_field(name: str) -> None:
    data, field, sentence = BAD_CHAINS[name]
    with pytest.raises(ChainError) as caught:
        parse_chain(data, source="bad.json")
    error = caught.value
    assert error.field == field
    assert sentence in str(error)
    assert error.hint
    assert "\n" not in str(error)
    if not field:
        assert "bad.json" in error.message
    assert error.exit_code == 65


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_bytes_are_a_chain_or_a_chain_error(data: bytes | str) -> None:
    with contextlib.suppress(ChainError):
        parse_chain(data if isinstance(data, bytes) else data.encode())


@given(st.data())
def test_a_valid_chain_with_one_value_swapped_is_a_chain_or_a_chain_error(data: st.DataObject) -> None:
    whole = json.loads(chain(agent(system="s", stop=["x"], chat_template_kwargs={"k": [1]}), inputs={"i": None}))
    fields = data.draw(st.sampled_from([whole, whole["agents"][0], whole["inputs"]]))
    values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    fields[data.draw(st.sampled_from([*fields, "other"]))] = data.draw(values | st.lists(values, max_size=2))
    try:
        parsed = parse_chain(json.dumps(whole).encode())
    except ChainError:
        return
    jsonschema.validate(whole, json_schema())
    # What a client accepts reaches the daemon: the wire format can carry it.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(parsed), type=Chain) == parsed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_by_our_checks_and_by_the_schema(path: Path) -> None:
    parse_chain(path.read_bytes(), source=path.name)
    jsonschema.validate(json.loads(path.read_text()), json_schema())


def test_the_schema_is_one_and_refuses_what_it_can_see() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    for name in ("unknown field of an agent", "no agents", "zero max_tokens", "name with a space", "unknown role"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(BAD_CHAINS[name][0]), json_schema())


def test_a_byte_order_mark_is_no_harm() -> None:
    assert parse_chain(b"\xef\xbb\xbf" + chain()) == parse_chain(chain())


# ------------------------------------------------------------------------------------------------------------ inputs


def test_inputs_merge_with_defaults() -> None:
    parsed = parse_chain(chain(inputs={"topic": None, "tone": "dry"}))
    assert resolve_inputs(parsed, {"topic": "tea"}) == {"topic": "tea", "tone": "dry"}
    assert resolve_inputs(parsed, {"topic": "", "tone": "warm"}) == {"topic": "", "tone": "warm"}


def test_an_input_without_a_value_is_named() -> None:
    with pytest.raises(ChainError, match="topic") as caught:
        resolve_inputs(parse_chain(chain(inputs={"topic": None})), {})
    assert caught.value.field == "inputs.topic"
    assert "--input topic=" in caught.value.hint


def test_an_unknown_input_is_named_with_those_there_are() -> None:
    with pytest.raises(ChainError, match='no input "topc"') as caught:
        resolve_inputs(parse_chain(chain(inputs={"topic": None})), {"topc": "tea"})
    assert "topic" in caught.value.hint


# -------------------------------------------------------------------------------------------------------- references

TWO = Chain(name="test", agents=[Agent(name="a", prompt="x"), Agent(name="b-2", prompt="y")], inputs={"i": None})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain", [TextPart("plain")]),
        ("{{a}}", [OutputPart(0)]),
        ("{{ a }}{{b-2}}", [OutputPart(0), OutputPart(1)]),
        ("<{{a}}>", [TextPart("<"), OutputPart(0), TextPart(">")]),
        ("{{{a}}}", [TextPart("{"), OutputPart(0), TextPart("}")]),
        ("{{{a}}{x", [TextPart("{"), OutputPart(0), TextPart("{x")]),
        ("{{input.i}} and", [TextPart("{{a}} \\{{ and")]),
        (r"\{{a}}", [TextPart("{{a}}")]),
        (r"\\{{a}}", [TextPart(r"\{{a}}")]),
        ("}} { } {", [TextPart("}} { } {")]),
    ],
)
def test_a_template_splits_at_its_references(text: str, parts: list[TextPart | OutputPart]) -> None:
    validate_chain(Chain(name="c", agents=[*TWO.agents, Agent(name="c", prompt=text)], inputs=TWO.inputs))
    assert text_parts(TWO, text, {"i": r"{{a}} \{{"}) == parts


pieces = st.lists(st.sampled_from([0, 1]) | st.text("{}\\a -\n", min_size=1, max_size=8), max_size=8)


@given(pieces)
def test_escaped_text_and_references_come_back_as_they_were(wanted: list[int | str]) -> None:
    # A brace or backslash right before a reference would read as part of it: that is what inputs are for.
    names = ["{{a}}", "{{ b-2 }}"]
    wanted = [piece if isinstance(piece, int) else piece.rstrip("{\\") + "." for piece in wanted]
    template = "".join(names[p] if isinstance(p, int) else p.replace("{{", r"\{{") for p in wanted)
    joined: list[TextPart | OutputPart] = []
    for piece in wanted:
        if isinstance(piece, int):
            joined.append(OutputPart(piece))
        elif joined and isinstance(joined[-1], TextPart):
            joined[-1] = TextPart(joined[-1].text + piece)
        else:
            joined.append(TextPart(piece))
    assert text_parts(TWO, template, {}) == joined


@given(st.text())
def test_an_input_is_never_scanned(value: str) -> None:
    expected = [TextPart(value)] if value else []
    assert text_parts(TWO, "{{input.i}}", {"i": value}) == expected


def test_upstreams_come_once_in_order_of_first_mention() -> None:
    parsed = parse_chain(
        chain(
            agent(name="a"),
            agent(name="b"),
            agent(name="c", system="{{b}} \\{{a}}", prompt="{{a}} {{input.i}} {{b}}"),
            without("prompt", name="d", prompt_ids=[1, "{{c}}", 2, "{{a}}"]),
            inputs={"i": "x"},
        )
    )
    assert [upstreams(parsed, at) for at in range(4)] == [[], [], [1, 0], [2, 0]]


def test_messages_are_rendered_with_inputs_and_outputs() -> None:
    parsed = parse_chain(
        chain(agent(name="a"), agent(name="b", system="On {{input.i}}.", prompt="Read {{a}}"), inputs={"i": None})
    )
    system, user = rendered_messages(parsed, 1, {"i": "tea"})
    assert (system.role, system.parts) == ("system", [TextPart("On tea.")])
    assert (user.role, user.parts) == ("user", [TextPart("Read "), OutputPart(0)])


def test_ids_and_outputs_keep_their_order_and_neighbours_are_one_part() -> None:
    parsed = parse_chain(chain(agent(), without("prompt", name="b", prompt_ids=[1, 2, "{{writer}}", "{{writer}}", 3])))
    assert raw_parts(parsed, 1, {}) == [IdsPart([1, 2]), OutputPart(0), OutputPart(0), IdsPart([3])]


def test_raw_text_keeps_its_own_text_apart_from_inputs() -> None:
    parsed = parse_chain(
        chain(agent(), without("prompt", name="b", raw_prompt="A {{input.i}}{{writer}}"), inputs={"i": "<s>"})
    )
    assert raw_parts(parsed, 1, {"i": "<s>"}) == [TextPart("A ", control=True), TextPart("<s>"), OutputPart(0)]
