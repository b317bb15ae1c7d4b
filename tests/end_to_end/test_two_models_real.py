"""Two real models of different tokenizers on two engines: what is read ahead equals series, in float32."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from connecting import with_keys
from daemon_process import DaemonProcess
from pingpong_bus.chain import Agent, Chain, parse_chain
from pingpong_bus.errors import ChainFailed
from pingpong_bus.messages import ChainResult, SubmitOptions

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

EXAMPLES = Path(__file__).parents[2] / "examples"
CHAIN = parse_chain((EXAMPLES / "two_models.json").read_bytes())


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """One daemon on two engines, each with a model of its own, for all tests of this file."""
    folder = Path(tempfile.mkdtemp(prefix="pp-"))
    config = with_keys((EXAMPLES / "two_models.toml").read_text(), {"calibrate": False})
    process = DaemonProcess(folder, config + '\n[calls.same]\ncommand = ["cat"]\n')
    try:
        asyncio.run(process.ready())
        yield process
    finally:
        asyncio.run(process.stop())
        shutil.rmtree(folder, ignore_errors=True)


async def run(daemon: DaemonProcess, chain: Chain, mode: str) -> ChainResult:
    async with daemon.client() as client:
        return await client.run(chain, options=SubmitOptions(mode=mode, isolate=True))  # type: ignore[arg-type]


async def test_the_models_have_tokenizers_of_their_own(daemon: DaemonProcess) -> None:
    async with daemon.client() as client:
        status = await client.status()
    first, second = (worker.limits for worker in status.workers)
    assert first is not None
    assert second is not None
    assert (first.vocabulary_size, second.vocabulary_size) == (49152, 20000)
    assert first.tokenizer
    assert second.tokenizer
    assert first.tokenizer != second.tokenizer
    assert [worker.model for worker in status.workers] == ["", "small-vocabulary"]


async def test_what_is_read_ahead_over_two_tokenizers_equals_series(daemon: DaemonProcess) -> None:
    series = await run(daemon, CHAIN, "serial")
    ahead = await run(daemon, CHAIN, "ping-pong")
    for first, second in zip(series.agents, ahead.agents, strict=True):
        assert first.output_ids == second.output_ids, first.name
        assert first.prompt_digest == second.prompt_digest, first.name
        assert first.text == second.text
    assert [agent.worker for agent in ahead.agents] == ["cpu0", "cpu1", "cpu0"]
    editor = ahead.agents[1]
    assert sum(append.tokens for append in editor.appends) > 0.8 * editor.prompt_tokens  # its text was read as it came
    assert max(editor.output_ids) < 20000
    assert [agent.seam.rollbacks for agent in ahead.agents[1:] if agent.seam is not None] == [0, 0]


async def test_an_agent_with_the_same_tokenizer_still_takes_ids(daemon: DaemonProcess) -> None:
    """Of its own model: nothing is joined as text there, and a text join of the same gives the same words."""
    writer = CHAIN.agents[0]
    reader = msgspec.structs.replace(
        CHAIN.agents[2], prompt="First text:\n\n{{writer}}\n\nSay it in five words.", max_tokens=16
    )
    ids = Chain(name="ids", agents=[writer, reader], inputs=CHAIN.inputs)
    text = msgspec.structs.replace(ids, agents=[writer, msgspec.structs.replace(reader, join="text")])
    spliced, joined = await run(daemon, ids, "serial"), await run(daemon, text, "serial")
    assert spliced.agents[1].seam is None
    assert joined.agents[1].seam is not None
    assert spliced.agents[0].output_ids == joined.agents[0].output_ids
    if spliced.agents[1].prompt_token_match:  # the ids of its text are those that were sampled
        assert spliced.agents[1].prompt_digest == joined.agents[1].prompt_digest


async def test_a_text_that_is_longer_than_it_was_counted_never_reaches_the_engine(daemon: DaemonProcess) -> None:
    """Each digit is an id; at submission two characters count as one."""
    step = Agent(name="step", input="{{editor}}{{input.digits}}", call="same", max_chars=3000)
    reader = Agent(name="reader", prompt="Read {{step}}", max_tokens=8)
    writer = msgspec.structs.replace(CHAIN.agents[1], prompt="Say one word.", max_tokens=4)
    chain = Chain(name="long", agents=[writer, step, reader], inputs={"digits": "7" * 2900})
    limit = r'agent "reader": a prompt of \d+ tokens and an output of \d+ do not fit in the engine\'s 2048'
    with pytest.raises(ChainFailed, match=limit):
        await run(daemon, chain, "serial")
    with pytest.raises(ChainFailed, match=limit):
        await run(daemon, chain, "ping-pong")
    short = msgspec.structs.replace(chain, inputs={"digits": "7" * 500})
    assert (await run(daemon, short, "ping-pong")).state == "finished"
    async with daemon.client() as client:
        assert [worker.restarts for worker in (await client.status()).workers] == [0, 0]
