"""Outputs that are joined as text: read ahead while they are written, with the ids of the whole text."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import threading
from collections.abc import AsyncGenerator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingpong_bus.chain import Agent, OutputPart, TextPart
from pingpong_bus.errors import ChainFailed, ConfigError
from pingpong_bus.messages import HopFinalized, HopFirstToken, OutputSource, Resume, SeamCounts, TokenizerSource
from pingpong_bus.token_log import TokenLogWriter
from pingpong_worker import seam_prompt
from pingpong_worker.incremental_tokens import GrowingIds, PieceByPiece
from pingpong_worker.seam_prompt import SeamPrompt
from pingpong_worker.seam_tokens import SeamTokens
from pingpong_worker.simulated_prompts import PAIRS, PairPrompts, SimulatedPrompts, simulated_prompts
from pingpong_worker.text import TextCodec
from pingpong_worker.text_source import TextSource, TokenizerShelf, no_other_tokenizers
from seam_stage import Stage, ended, parts, seam_stage


@pytest.fixture
async def stage() -> AsyncGenerator[Stage, None]:
    async with seam_stage() as made:
        yield made


async def test_an_output_of_another_tokenizer_is_read_ahead_and_gives_the_ids_of_the_text(stage: Stage) -> None:
    stage.prompts = PairPrompts()
    own = TokenizerSource(model="simulated-bytes")
    joined = stage.joined(parts("read: ", 0, " end"), sources={0: OutputSource(tokenizer=own)})
    whole = PairPrompts().join(joined, {0: "hello there, world"})
    task = asyncio.create_task(stage.feed(joined).run())
    static = await stage.sent(6)
    assert static == whole[: len(static)], "what stands before the output does not wait for it"
    stage.write(0, list(b"hello the"))
    await stage.sent(len(static) + 4)
    stage.write(0, list(b"re, world"))
    grown = await stage.sent(len(static) + 8)
    assert grown == whole[: len(grown)]
    stage.close(0)
    end = await ended(task)
    assert (end.state, end.seam) == ("finished", SeamCounts(rollbacks=0, tokens=0))
    assert stage.engine.session.prompt == whole
    assert len(stage.engine.session.appends) >= 2
    (finalized,) = stage.of(HopFinalized)
    assert isinstance(finalized, HopFinalized)
    digest = hashlib.sha256(struct.pack(f"<{len(whole)}I", *whole)).hexdigest()
    assert (finalized.prompt_tokens, finalized.prompt_digest) == (len(whole), digest)
    order = [type(message) for message in stage.messages]
    assert order.index(HopFinalized) < order.index(HopFirstToken)


async def test_series_and_read_ahead_give_the_same_ids(stage: Stage) -> None:
    stage.prompts = PairPrompts()
    joined = stage.joined(parts("x", 0, "y", 1, "z"))
    stage.write(0, list(b"first"))
    stage.close(0)
    stage.write(1, list("zweite Ausgäbe".encode()))
    stage.close(1)
    assert (await ended(asyncio.create_task(stage.feed(joined).run()))).state == "finished"
    assert stage.engine.session.appends == [], "all was known"
    assert stage.engine.session.prompt == PairPrompts().join(joined, {0: "first", 1: "zweite Ausgäbe"})


async def test_blocks_of_thoughts_are_left_out_while_they_stream(stage: Stage) -> None:
    joined = stage.joined(parts("A", 0), sources={0: OutputSource(strip="think", inside=True)})
    task = asyncio.create_task(stage.feed(joined).run())
    stage.write(0, list(b"first I think</thi"))
    stage.write(0, list(b"nk>\n\nThe answer"))
    before = len(SimulatedPrompts().join(joined, {0: ""})) - 12
    sent = await stage.sent(before + 5)
    assert b"think" not in bytes(token for token in sent if token < 256)
    stage.close(0)
    await ended(task)
    assert stage.engine.session.prompt == SimulatedPrompts().join(joined, {0: "The answer"})


async def test_a_step_s_characters_are_read(stage: Stage) -> None:
    joined = stage.joined(parts("A", 0, "B"), sources={0: OutputSource(characters=True)})
    stage.write(0, [ord(letter) for letter in "né🚀\ud800"])
    stage.close(0)
    await ended(asyncio.create_task(stage.feed(joined).run()))
    assert stage.engine.session.prompt == SimulatedPrompts().join(joined, {0: "né🚀\ufffd"})


async def test_a_character_that_is_not_whole_is_never_sent(stage: Stage) -> None:
    joined = stage.joined(parts("A", 0))
    task = asyncio.create_task(stage.feed(joined).run())
    rocket = list("🚀".encode())
    stage.write(0, [*b"abcdefgh", *rocket[:2]])
    static = len(SimulatedPrompts().join(joined, {0: ""})) - 12
    sent = await stage.sent(static + 7)
    assert rocket[0] not in sent
    stage.write(0, rocket[2:])
    stage.close(0)
    await ended(task)
    assert stage.engine.session.prompt == SimulatedPrompts().join(joined, {0: "abcdefgh🚀"})


class Watched(SimulatedPrompts):
    """Keeps `held` characters back, and notes which thread is at work and what the prompt says meanwhile."""

    def __init__(self, held: int = 0) -> None:
        self.held = held
        self.threads: list[tuple[int, bool]] = []
        """Characters taken, and whether on the event loop's thread."""
        self.ends: list[bool] = []
        """For each end of a text, whether on that thread."""
        self.tails: list[bool] = []
        self.prompt: SeamPrompt | None = None

    def growing(self, *, control: bool, first: bool = False) -> GrowingIds:
        watched = self

        class Growing(PieceByPiece):
            waiting = watched.held

            def feed(self, text: str) -> list[int]:
                watched.threads.append((len(text), threading.current_thread() is threading.main_thread()))
                if watched.prompt is not None:
                    watched.tails.append(watched.prompt.literal_tail)
                return super().feed(text)

            def finish(self) -> list[int]:
                watched.ends.append(threading.current_thread() is threading.main_thread())
                return super().finish()

        return Growing(self.encode_text)


@pytest.mark.parametrize(("held", "inline"), [(10, True), (5000, False)])
async def test_the_loop_is_not_held_up_by_text_that_waits_for_its_end(stage: Stage, held: int, inline: bool) -> None:
    stage.prompts = watched = Watched(held)
    joined = stage.joined(parts("A", 0))
    stage.write(0, list(b"few"))
    stage.close(0)
    await ended(asyncio.create_task(stage.feed(joined).run()))
    assert (3, inline) in watched.threads, "a few characters take as long as all that is looked at with them"
    assert watched.ends[-1] is inline, "and where that is short, no thread is waited for before the prompt is complete"


async def test_what_a_block_held_back_is_tokenized_in_a_thread(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam_prompt, "_INLINE_CHARS", 100)
    stage.prompts = watched = Watched()
    joined = stage.joined(parts("A", 0), sources={0: OutputSource(strip="think")})
    task = asyncio.create_task(stage.feed(joined).run())
    for _ in range(10):
        stage.write(0, list(b"no block "))
        await asyncio.sleep(0)
    stage.close(0)
    await ended(task)
    assert (90, True) in watched.threads, "no tag came, so all of it comes at its end"
    monkeypatch.setattr(seam_prompt, "_INLINE_CHARS", 80)
    await ended(asyncio.create_task(stage.feed(joined).run()))
    assert (90, False) in watched.threads


async def test_the_last_text_leaves_an_id_for_the_answer_while_a_thread_takes_it(stage: Stage) -> None:
    stage.prompts = watched = Watched()
    joined = stage.joined([OutputPart(0), TextPart("x" * 3000)])
    joined = msgspec.structs.replace(joined, agent=Agent(name="a", raw_prompt="x"))
    stage.close(0)
    tokenizers = TokenizerShelf(no_other_tokenizers)
    watched.prompt = prompt = SeamPrompt(joined, watched, tokenizers, stage.slab, stage.subscriber)
    await prompt.begin()
    assert len(prompt.ids) == 3000
    assert watched.threads == [(3000, False)]
    assert watched.tails == [False], "no id follows those that are given now: one of them is kept for finalize"


class Hasty(PairPrompts):
    """Commits ids that later text changes."""

    def growing(self, *, control: bool, first: bool = False) -> GrowingIds:
        return super().growing(control=True, first=first) if control else PieceByPiece(lambda text: list(text.encode()))


async def test_ids_that_turn_out_wrong_are_taken_back_and_counted(stage: Stage) -> None:
    stage.prompts = Hasty()
    joined = stage.joined(parts("1234 ", 0, " 5678"))
    task = asyncio.create_task(stage.feed(joined).run())
    stage.write(0, list(b"hello again"))
    whole = PairPrompts().join(joined, {0: "hello again"})
    await stage.sent(whole.index(ord("4")) + 6)
    stage.close(0)
    end = await ended(task)
    right = whole.index(ord("4")) + 2
    session = stage.engine.session
    assert end.state == "finished"
    assert session.rollbacks == [right], "to the common beginning"
    assert end.seam == SeamCounts(rollbacks=1, tokens=len(session.answered[0]) - right)
    assert session.prompt == whole
    assert session.answered[-1] == whole
    (finalized,) = stage.of(HopFinalized)
    assert isinstance(finalized, HopFinalized)
    assert finalized.prompt_digest == hashlib.sha256(struct.pack(f"<{len(whole)}I", *whole)).hexdigest()
    assert finalized.final_tokens == len(whole) - right
    assert len(stage.of(HopFirstToken)) == 1, "nothing of the answer to the wrong prompt was passed on"
    assert end.output_tokens == 5


async def test_sessions_that_take_nothing_back_are_not_used(stage: Stage) -> None:
    joined = stage.joined(parts("A", 0))
    stage.close(0)
    await ended(asyncio.create_task(stage.feed(joined, session="streaming-input").run()))
    assert stage.engine.kinds == ["prefix-cache"]


async def test_a_resumed_hop_reads_all_of_its_prompt_first(stage: Stage) -> None:
    TokenLogWriter(stage.slab, stage.output).append([72])
    joined = stage.joined(parts("A", 0))
    task = asyncio.create_task(stage.feed(joined, resume=Resume(tokens=1, text_chars=1)).run())
    stage.write(0, list(b"words and words"))
    await asyncio.sleep(0.02)
    assert stage.engine.session.prompt == []
    stage.close(0)
    await ended(task)
    whole = SimulatedPrompts().join(joined, {0: "words and words"})
    assert stage.engine.session.prompt == [*whole, 72]


async def test_an_upstream_that_ends_incomplete_fails_the_hop(stage: Stage) -> None:
    task = asyncio.create_task(stage.feed(stage.joined(parts("A", 0))).run())
    stage.write(0, list(b"some"))
    await stage.sent(3)
    stage.abort(0)
    end = await ended(task)
    assert (end.state, end.code) == ("failed", ChainFailed.__name__)


async def test_a_tokenizer_that_cannot_be_loaded_fails_the_hop_with_its_name(stage: Stage) -> None:
    def load(model: str) -> SimulatedPrompts:
        raise ConfigError(f'no "{model}"', field="models")

    stage.load = load
    joined = stage.joined(parts("A", 0), sources={0: OutputSource(tokenizer=TokenizerSource(model="gone"))})
    stage.close(0)
    end = await ended(asyncio.create_task(stage.feed(joined).run()))
    assert (end.state, end.code) == ("failed", ConfigError.__name__)
    assert "gone" in end.message


async def test_prompts_that_cannot_be_cut_wait_for_texts_of_others(stage: Stage) -> None:
    sources = {0: OutputSource(strip="think"), 1: OutputSource(characters=True)}
    joined = stage.joined(parts("A", 0, 1), sources=sources, ahead=False)
    feed = stage.feed(joined)
    task = asyncio.create_task(feed.run())
    stage.write(0, list(b"<think>no</think>yes"))
    stage.write(1, [ord("é")])
    stage.close(0)
    await asyncio.sleep(0.02)
    assert stage.engine.session.prompt == []
    stage.close(1)
    end = await ended(task)
    assert (end.state, end.seam) == ("finished", None)
    assert stage.engine.session.prompt == SimulatedPrompts().join(joined, {0: "yes", 1: "é"})
    assert (await feed.check()).prompt_token_match is True


async def test_the_whole_text_is_compared_for_the_result(stage: Stage) -> None:
    joined = stage.joined(parts("A", 0), sources={0: OutputSource(strip="think")})
    stage.write(0, list(b"<think>x</think>y"))
    stage.close(0)
    feed = stage.feed(joined)
    await ended(asyncio.create_task(feed.run()))
    assert (await feed.check()).prompt_token_match is True


# ------------------------------------------------------------------------------------------------------ its parts alone

WORDS = ["ab", "abc", " ", "xyz", "1", "é", "<|im_end|>", "", "q"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from(WORDS), max_size=5)), max_size=6))
def test_parts_that_come_in_pieces_give_what_they_give_at_once(pieces: list[tuple[bool, list[str]]]) -> None:
    codec = PairPrompts()
    tokens = SeamTokens(codec)
    # The simulated tokenizers take the template's own text in stretches that nothing spans.
    pieces = [(control, ["".join(texts) + "\n"] if control else texts) for control, texts in pieces]
    for control, texts in pieces:
        for text in texts:
            tokens.feed(text, control=control)
    early = list(tokens.ids)
    tokens.finish()
    assert tokens.ids == tokens.whole()
    assert tokens.whole()[: len(early)] == early
    assert tokens.whole() == codec.tokenize([TextPart("".join(texts), control) for control, texts in pieces])


def test_a_step_s_log_of_what_are_no_characters_is_a_fault() -> None:
    with pytest.raises(ChainFailed, match="no character"):
        TextSource(OutputSource(characters=True), None).feed([0x110000])


async def test_tokenizers_are_loaded_once_and_tried_again_after_a_failure() -> None:
    loads: list[str] = []

    def load(source: TokenizerSource) -> TextCodec:
        loads.append(source.model)
        if len(loads) == 1:
            raise ConfigError("not there yet")
        return SimulatedPrompts()

    shelf = TokenizerShelf(load)
    source = TokenizerSource(model="m")
    with pytest.raises(ConfigError):
        await shelf.get(source)
    first, second = await asyncio.gather(shelf.get(source), shelf.get(TokenizerSource(model="m")))
    assert first is second
    assert loads == ["m", "m"]
    with pytest.raises(ConfigError, match="not at hand"):
        no_other_tokenizers(source)


def test_the_second_simulated_tokenizer_is_another_one() -> None:
    assert simulated_prompts(PAIRS).tokenizer != SimulatedPrompts().tokenizer
