"""What must not stand in a log is taken out, and what people need to find a fault stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpongd.config import parse_config
from pingpongd.redaction import LONGEST, Redactor, redactor_of, secret_values

GUARDED = Redactor()

SECRET = [
    "HTTP 401 for hf_AbCdEfGhIjKlMnOpQrStUvWxYz",
    "OPENAI: sk-proj-abcdefghijklmnopqrstuvwx is wrong",
    "clone https://user:hunter2hunter2@example.org/x.git failed",
    "GET https://example.org/model?token=abcdefgh12345&x=1",
    "GET https://example.org/b?X-Amz-Signature=abcdef0123456789&X-Amz-Date=1",
    "Authorization: Bearer abcdef.ghijkl-mnop",
    "headers={'authorization': 'Basic dXNlcjpwYXNz'}",
    "HF_TOKEN=abcdef123456",
    "NAMEOFAPRODUCTTHATISLONGERTHANFORTYCHARACTERSAPIKEY=abcdef123456",
    '{"api_key": "abcdef123456"}',
    "--api-key 'abcdef123456'",
    "AWS AKIAABCDEFGHIJKLMNOP",
    "password: hunter2hunter2",
    "jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_ghi",
    "-----BEGIN PRIVATE KEY-----\nMIIabcdef123456\n-----END PRIVATE KEY-----",
]
HARMLESS = [
    "the engine ended with SIGKILL",
    'agents[2].prompt: there is no agent "summary" before it. Name an earlier one.',
    "prompt 3,000 tokens + max_tokens 512 is more than the 2,048 that the engine takes",
    "/home/ann/.cache/huggingface/hub/models--x/tokenizer_config.json is missing",
    "tokenizer='/models/x', tokenizer_mode=auto, trust_remote_code=False, tokens=5, max_tokens: 4096",
    "it doesn't start, and that's all",
    "Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:01<00:00,  3.05it/s]",
    "CUDA error at [0, 1, 2]: out of memory",
    "https://example.org/page?id=5#top",
]
ALWAYS = ("AbCdEfGh", "abcdef", "hunter2", "dXNlcjpwYXNz", "eyJzdWIi", "AKIAABCD")


@pytest.mark.parametrize("text", SECRET)
def test_secrets_are_taken_out_also_where_prompts_may_be_quoted(text: str) -> None:
    for redactor in (GUARDED, Redactor(prompts=True)):
        shown = redactor.text(text)
        assert "***" in shown
        assert not any(secret in shown for secret in ALWAYS), shown


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_harmless_stays_as_it_is(text: str) -> None:
    assert GUARDED.text(text) == text


def test_long_quotations_and_ids_are_left_out_unless_they_are_asked_for() -> None:
    said = "Dear doctor, " + "my knee hurts when it rains, and " * 5
    texts = [
        f"ValueError: cannot tokenize {said!r}",
        f'bad request: "{said}',  # cut before its end
        'agents[0].prompt: "{{my knee hurts}}" names no agent.',
        "Received request 7: prompt: 'my knee hurts', params: x",
        "SchedulerOutput(prompt_token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...])",
    ]
    for text in texts:
        shown = GUARDED.text(text)
        assert "knee" not in shown
        assert "3, 4" not in shown
        assert "characters>" in shown or "numbers]" in shown
        assert Redactor(prompts=True).text(text) == text
    assert "params: x" in GUARDED.text(texts[3])
    assert GUARDED.text('"{{ sumary }}" names no agent.') == '"{{ sumary }}" names no agent.'


def test_known_secrets_are_found_wherever_they_stand() -> None:
    environment = {
        "HF_TOKEN": "correct horse",
        "MY_API_KEY": "battery!",
        "PATH": "/usr/bin",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert secret_values(environment) == {"correct horse", "battery!"}
    redactor = Redactor(secrets=secret_values(environment))
    assert redactor.text("it said correct horse and battery! in false") == "it said *** and *** in false"
    assert Redactor(secrets=["1"]).text("1 of 1") == "1 of 1"  # too short to be told from a number


def test_a_secret_is_found_where_a_text_is_cut() -> None:
    text = "x" * (LONGEST - 5) + " hf_" + "a" * 40 + "x" * 10_000
    assert "aaa" not in GUARDED.text(text)


def test_values_of_all_kinds() -> None:
    line = {
        "a": [1, True, None, 2.5, float("nan")],
        "b": {"c": "HF_TOKEN=abcdef123456"},
        "d": ValueError("x"),
        "e": ("y",),
    }
    assert GUARDED.value(line) == {
        "a": [1, True, None, 2.5, None],
        "b": {"c": "HF_TOKEN=***"},
        "d": "x",
        "e": ["y"],
    }
    assert GUARDED.value(["x"] * 5000) == ["x"] * 1000


def test_the_configuration_names_secrets_of_workers() -> None:
    group = {"name": "a", "devices": ["cpu:0"], "environment": {"OTHER_TOKEN": "group-secret"}}
    config = parse_config({"groups": [group], "environment": {"HF_TOKEN": "common-secret"}})
    redactor = redactor_of(config, {"SOME_PASSWORD": "own-secret"})
    assert redactor.text("group-secret common-secret own-secret") == "*** *** ***"


@given(st.text(alphabet="\"'\\a[1, ]:=eyJ.-_", max_size=300))
def test_any_text_can_be_looked_at(text: str) -> None:
    once = GUARDED.text(text)
    assert len(once) <= LONGEST + 100


@pytest.mark.parametrize(
    "bad", ['\\"', "'\"", "a_token", "[1,", "[1, ", '"\\', "https://", "-----BEGIN PRIVATE KEY-----", "eyJ", "_", "sk-"]
)
def test_no_text_takes_long(bad: str) -> None:
    import time

    begun = time.perf_counter()
    GUARDED.text(bad * 100_000)
    assert time.perf_counter() - begun < 1.0  # 1 to 20 ms; what grows with the square of a text takes minutes
