"""The comparison of two runs: every kind of difference is seen, and nothing else."""

import hashlib
import os
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import NotEqual
from pingpong_bus.messages import AgentResult, ChainResult
from pingpong_client.certificate import (
    Certificate,
    Difference,
    chain_digest,
    compare_agents,
    compare_runs,
    describe,
    digest,
)
from pingpong_client.certificate_file import read_certificate, write_certificate
from pingpong_client.certificate_table import certificate_lines
from pingpong_client.output_file import check_writable
from pingpong_client.rescoring import question

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


def agent(prompt, output, **fields):
    values = {
        "name": "writer",
        "state": "finished",
        "prompt_ids": prompt,
        "prompt_digest": digest(prompt),
        "output_ids": output,
        "finish_reason": "stop",
        "stop_token": 2,
    }
    return AgentResult(**(values | fields))


@given(IDS)
def test_the_digest_is_sha256_over_little_endian_words(ids):
    assert digest(ids) == hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


@given(IDS, IDS)
def test_equal_runs_are_equal(prompt, output):
    found = compare_agents(agent(prompt, output), agent(prompt, output))
    assert found.equal
    assert found.difference is None
    assert (found.prompt_tokens, found.output_tokens) == (len(prompt), len(output))


@given(IDS, IDS, st.sampled_from(["prompt", "output"]))
def test_the_first_difference_is_named(ours, theirs, where):
    pair = [agent([1], ids) if where == "output" else agent(ids, [1]) for ids in (ours, theirs)]
    found = compare_agents(*pair)
    if ours == theirs:
        assert found.equal
        return
    difference = found.difference
    assert not found.equal
    assert difference.where == where
    at = difference.index
    assert ours[:at] == theirs[:at]
    assert ours[at : at + 1] == ([] if difference.serial is None else [difference.serial])
    assert theirs[at : at + 1] == ([] if difference.read_ahead is None else [difference.read_ahead])
    assert difference.serial != difference.read_ahead


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"stop_token": 3}, "stop token"),
        ({"stop_token": None}, "stop token"),
        ({"finish_reason": "length"}, "finish reason"),
        ({"prompt_digest": "0" * 64}, "prompt digest"),
        ({"prompt_ids": None}, "prompt digest"),
    ],
)
def test_what_ids_alone_do_not_show(change, where):
    one, other = agent([1, 2], [3]), agent([1, 2], [3], **change)
    assert compare_agents(one, other).difference.where == where
    assert compare_agents(other, one).difference.where == where


def test_a_digest_that_is_wrong_on_both_sides_is_a_difference():
    # The engine was given something else than the daemon says, twice alike.
    wrong = agent([1, 2], [3], prompt_digest=digest([1, 9]))
    assert not compare_agents(wrong, wrong).equal


def joined(seen, **fields):
    """An agent whose prompt ids only its worker knows."""
    return agent(seen, [3], **({"prompt_ids": None, "prompt_tokens": len(seen)} | fields))


def test_prompts_that_only_the_worker_knows_are_compared_by_digest():
    same = compare_agents(joined([1, 2]), joined([1, 2]))
    assert same.equal
    assert (same.prompt_tokens, same.prompt_digest) == (2, digest([1, 2]))
    other = compare_agents(joined([1, 2]), joined([1, 3]))
    assert other.difference == Difference(where="prompt digest", serial=digest([1, 2]), read_ahead=digest([1, 3]))
    assert compare_agents(joined([1]), joined([1], stop_token=9)).difference.where == "stop token"


def test_without_ids_and_digests_nothing_is_proven():
    assert not compare_agents(joined([1], prompt_digest=""), joined([1], prompt_digest="")).equal


def step(text):
    return AgentResult(name="take", state="finished", kind="extract", text=text, output_ids=[], finish_reason="stop")


def test_steps_between_agents_are_compared_by_their_text():
    same = compare_agents(step("né"), step("né"))
    assert same.equal
    assert (same.prompt_tokens, same.output_tokens, same.output_digest) == (0, 2, digest([ord("n"), ord("é")]))
    other = compare_agents(step("no"), step("né"))
    difference = other.difference
    assert (difference.where, difference.index, difference.serial, difference.read_ahead) == ("text", 1, 111, 233)
    assert question(difference, step("no"), step("né")) == "no engine wrote it: it is a step's"


def certificate(*outputs):
    def run(output):
        return ChainResult(id="x", name="n", state="finished", e2e_ms=1000.0, agents=[agent([1], output)])

    runs = [compare_runs(run([5]), run(output)) for output in outputs]
    equal = sum(pair.equal for pair in runs)
    return Certificate(
        made_at="2026-05-04T09:30:00+00:00",
        chain="n",
        chain_digest="c" * 64,
        proof=equal == len(runs),
        no_proof=[] if equal == len(runs) else ["1 of 2 runs differ"],
        exactness="grid",
        grid=256,
        mode="ping-pong",
        python="3.11.9",
        devices=["CPU"],
        verdict="equal" if equal == len(runs) else "different",
        pairs=len(runs),
        equal_pairs=equal,
        daemon="1",
        engines=["e"],
        models=["m"],
        dtypes=["float32"],
        sessions=["prefix-cache"],
        runs=runs,
    )


def test_check_names_run_agent_and_token():
    certificate([5], [5]).check()
    with pytest.raises(NotEqual) as caught:
        certificate([5], [6]).check()
    assert str(caught.value) == (
        "run 2, agent writer: output token 0 is 5 in series and 6 read ahead. 1 of 2 runs were equal."
    )
    assert caught.value.exit_code == 3


def test_the_table_fits_and_says_all():
    lines = certificate_lines(certificate([5], [5, 6]), width=80)
    text = "\n".join(lines)
    assert all(len(line) <= 80 for line in lines)
    for word in ("float32", "isolated", "prefix-cache", "DIFFERENT", "different: 1 of 2 runs equal", digest([5])[:12]):
        assert word in text


def test_the_table_shows_the_gap_or_why_there_is_none():
    made = certificate([6])
    for fields, says in (
        ({"logit_gap": -0.015625}, "logit gap, rescored: -0.015625 (the serial token's minus the other's)"),
        ({"no_gap": "the prompts differ"}, "no logit gap: the prompts differ"),
    ):
        found = msgspec.structs.replace(made.runs[0].agents[0].difference, **fields)
        run = msgspec.structs.replace(
            made.runs[0], agents=[msgspec.structs.replace(made.runs[0].agents[0], difference=found)]
        )
        assert f"        {says}" in certificate_lines(msgspec.structs.replace(made, runs=[run]))


def test_a_certificate_replaces_files_alone(tmp_path: Path) -> None:
    made = certificate([5])
    kept, link, pipe = tmp_path / "kept", tmp_path / "link", tmp_path / "pipe"
    kept.write_text("before")
    link.symlink_to(kept)
    check_writable(link)
    write_certificate(link, made)
    assert link.is_symlink()
    assert read_certificate(kept) == made

    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_certificate(pipe, made)
        assert pipe.is_fifo()
        assert os.read(reader, 1 << 16) == kept.read_bytes()
    finally:
        os.close(reader)
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "link", "pipe"}


def test_what_decides_the_digest_of_a_chain():
    chain = Chain(name="n", agents=[Agent(name="a", prompt="{{input.x}}")], inputs={"x": "1"})
    alike = msgspec.structs.replace(chain, name="m", exactness="grid", itl_target_ms=20.0)
    assert chain_digest(chain) == chain_digest(alike) == chain_digest(alike, {"x": "1"})
    assert chain_digest(chain) != chain_digest(chain, {"x": "2"})
    longer = msgspec.structs.replace(chain, agents=[msgspec.structs.replace(chain.agents[0], max_tokens=9)])
    assert chain_digest(chain) != chain_digest(longer)


def test_it_survives_json():
    made = certificate([5], [6])
    assert msgspec.json.decode(msgspec.json.encode(made), type=Certificate) == made


def test_a_missing_token_in_words():
    difference = Difference(where="output", index=3, serial=None, read_ahead=9)
    assert describe(difference) == "output token 3 is nothing in series and 9 read ahead"
