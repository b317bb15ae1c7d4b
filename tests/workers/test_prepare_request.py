"""Prompts that a worker prepares: those that it is asked for, with what a user has to know of them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pingpong_bus.chain import Agent, Chain, Extract
from pingpong_bus.messages import Literals, OutputOf, Prepare, Prepared, PreparedAgent, WorkerMessage
from pingpong_worker.prompt import PromptCodec, Prompts, prepare_ids
from pingpong_worker.simulated_prompts import SimulatedPrompts
from pingpong_worker.worker_requests import Requests, Serving
from seam_stage import Engine

CHAIN = Chain(
    name="c",
    agents=[
        Agent(name="one", raw_prompt="a<think>\n"),
        Agent(name="step", input="{{one}}", extract=Extract(fenced="")),
        Agent(name="two", raw_prompt="b{{step}}c"),
        Agent(name="three", raw_prompt="d{{one}}"),
    ],
)


def words(*, strips: bool) -> Prompts:
    """A tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if strips:
        tokenizer.normalizer = normalizers.Strip()
    return Prompts(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


async def prepared(prompts: PromptCodec | None, chain: Chain = CHAIN, **more: Any) -> list[PreparedAgent]:
    replies: list[WorkerMessage] = []
    requests = Requests(replies.append)
    serving = Serving(cast(Any, Engine()), prompts, cast(Any, None), cast(Any, None), cast(Any, None))
    requests.take(serving, Prepare(request=1, chain=chain, inputs={}, **more))
    async with asyncio.timeout(20):
        while not replies:
            await asyncio.sleep(0.001)
    (reply,) = replies
    assert isinstance(reply, Prepared), reply
    return reply.agents


@pytest.mark.parametrize("prompts", [words(strips=False), SimulatedPrompts()], ids=["bytes", "simulated"])
async def test_the_agents_that_are_asked_for_are_prepared_in_their_order(prompts: PromptCodec) -> None:
    three, one = await prepared(prompts, agents=[3, 0])
    assert isinstance(three.segments[-1], OutputOf)
    assert isinstance(one.segments[0], Literals)
    assert (one.thinking, three.thinking) == (True, False), "its prompt ends inside a block"
    assert [bool(agent.segments) for agent in await prepared(prompts)] == [True, False, True, True]


async def test_a_tokenizer_that_takes_text_whole_says_so_where_text_is_joined() -> None:
    agents = await prepared(words(strips=True), agents=[0, 2, 3], as_text=[2])
    assert [bool(agent.note) for agent in agents] == [False, True, False]
    assert "Strip" in agents[1].note
    assert [agent.note for agent in await prepared(words(strips=False), agents=[0, 2, 3], as_text=[2])] == ["", "", ""]


async def test_models_without_a_tokenizer_prepare_ids_of_those_agents() -> None:
    chain = Chain(name="c", agents=[Agent(name="one", prompt_ids=[1, 2]), Agent(name="two", raw_prompt="text")])
    assert await prepared(None, chain, agents=[0]) == [PreparedAgent(segments=[Literals(ids=[1, 2])])]
    assert prepare_ids(Chain(name="c", agents=[CHAIN.agents[1]]), 9) == [PreparedAgent(segments=[])]
