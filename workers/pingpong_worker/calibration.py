"""Measures what an engine takes for prompts and answers, through its sessions, as any caller would see it.

Prompts grow until one takes too long, so that a slow engine is measured at what it is used for, and a fast one far up.
What is computed for one figure must not be found for another: each prompt has a salt of its own, or an end of its own
behind a context that is meant to be found. A run that is cancelled leaves no session behind.

Beside a decode an engine with our scheduler computes as many appended tokens as its prices allow, and prices are learnt
by going a little beyond what was seen. So appends grow as well, and those at the loosest pace come first: what the
figures tell is what the scheduler does once it knows, and the first chain finds it knowing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from statistics import fmean, median_low
from typing import Final, TypeVar

from pingpong_bus.errors import EngineError
from pingpong_bus.messages import BesideFigure, DecodePace, EngineFigures, Progress, Sampling
from pingpong_worker.calibration_sizes import next_append, next_length
from pingpong_worker.engine import Engine, Session
from pingpong_worker.timed_answer import TimedAnswer, TokenTimes, percentile, usual

MEASURING: Final = "measuring the engine"
"""The stage's name."""
_REPEATS = 3
_REPEATED_BELOW_S = 0.5
"""What has taken so long is not measured again; else the median of all counts."""
_CONTEXT = 256
"""Of the shorter of two contexts, and of answers that are decoded together, in tokens."""
_RESTS: Final = (8, 64)
"""Tokens of a prompt that are not computed when its answer is asked for."""
_DROPPED = 4
"""First tokens of an answer that count for nothing: the step before them was another's."""
_DECODED = 64
"""Tokens that are timed, of one answer alone."""
_DECODED_TOGETHER = 32
_TOGETHER: Final = (2, 4, 8)
_ENOUGH_TOKENS = 8
_ENOUGH_S = 0.7
"""An answer of a slow engine is not waited for any longer, once so many tokens have come."""
_FIRST_APPEND = 16
"""Tokens; the scheduler's patience with appends that get nothing grants them in one step."""
_LONGEST_APPEND_S = 4.0
_MOST_ANSWERED = 256
"""Tokens of a decode that has to last as long as the appends beside it; as many as answers have, for a scheduler of
ours grants appends the more, the sooner the decode ends."""
_PLAIN_IDS = 1000
"""Token ids below it are text in every model; higher ones may stand for an image."""
_BUDGET_S = 20.0
"""No other figure is begun later than this: what is left out, the placement guesses."""


T = TypeVar("T")


async def calibrate(
    engine: Engine,
    paces: Sequence[float] = (DecodePace().itl_ratio,),
    on_progress: Callable[[Progress], object] = lambda _: None,
) -> EngineFigures:
    """Measure an engine that does nothing else; its prefix cache is empty afterwards.

    Args:
        engine: warmed up.
        paces: what decodes are kept to while appends are measured beside them, as `DecodePace.itl_ratio`.
        on_progress: is told how many figures are measured; of how many once that is known.

    Raises:
        EngineError: it failed, or has no room for the shortest prompt.
    """
    await engine.reset_prefix_cache()
    figures = await _Calibration(engine, paces, on_progress).run()
    await engine.reset_prefix_cache()
    return figures


class _Calibration:
    """One run over an engine."""

    def __init__(self, engine: Engine, paces: Sequence[float], on_progress: Callable[[Progress], object]) -> None:
        limits = engine.limits
        self._engine = engine
        self._limits = limits
        self._paces = sorted(set(paces), reverse=True) if limits.overlap else []
        if not limits.decode_first:
            del self._paces[1:]  # it keeps to none
        self._on_progress = on_progress
        self._measured = self._to_measure = 0
        self._numbers = itertools.count()
        self._deadline = time.monotonic() + _BUDGET_S
        self._longest = min(limits.max_model_len, limits.kv_tokens) - max(_RESTS) - _DROPPED - _DECODED
        """Tokens of a prompt that leave room for an answer."""
        self._salt = ""
        """Of the longest prompt so far: every beginning of it is a context that is computed already."""

    async def run(self) -> EngineFigures:
        """Measure everything, what matters most first."""
        if self._longest < 1:
            room = min(self._limits.max_model_len, self._limits.kv_tokens)
            raise EngineError(f"an engine with room for {room} tokens is too small to be measured.")
        prefill = await self._prefills()
        short, middle, long = self._contexts([tokens for tokens, _ in prefill])
        decoded, behind, above = sorted({short, long}), sorted({short, middle, long} - {0}), sorted({0, long})
        self._to_measure = self._measured + len(decoded) + len(behind) * len(_RESTS) + len(_TOGETHER)
        self._to_measure += len(self._paces) * len(above)
        counted = self._counted
        decode = {context: await counted(self._decode(context)) for context in decoded}
        finalize = [
            (context, rest, await counted(self._finalize(context, rest))) for context in behind for rest in _RESTS
        ]
        beside = [await counted(self._beside(context, short, pace)) for pace in self._paces[:1] for context in above]
        batch = [(answers, await counted(self._together(answers, short))) for answers in _TOGETHER]
        beside += [await counted(self._beside(context, short, pace)) for pace in self._paces[1:] for context in above]
        steps_ms = decode[short].steps_ms()
        return EngineFigures(
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            prefill=prefill,
            finalize=finalize,
            # By length, of which the middle counts: of a slow engine's answers one may have been given up early.
            decode=sorted(
                {
                    context + _RESTS[0] + _DROPPED + answer.tokens // 2: usual(answer.steps_ms())
                    for context, answer in decode.items()
                }.items()
            ),
            batch=[(answers, ms) for answers, ms in batch if ms is not None],
            beside=sorted(
                (figure for figure in beside if figure is not None),
                key=lambda figure: (figure.context, figure.tokens, figure.itl_ratio),
            ),
            step_p50_ms=percentile(steps_ms, 0.5),
            step_p99_ms=percentile(steps_ms, 0.99),
        )

    async def _counted(self, figure: Awaitable[T]) -> T:
        """Measure a figure, and say so."""
        measured = await figure
        self._measured += 1
        self._on_progress(Progress(stage=MEASURING, done=self._measured, total=self._to_measure, unit="figures"))
        return measured

    async def _prefills(self) -> list[tuple[int, float]]:
        """Prompts of which nothing is cached, from short to long: tokens, ms to the first token."""
        table: list[tuple[int, float]] = []
        tokens, ms = 0, 0.0
        while (longer := next_length(tokens, ms / 1e3, self._longest)) is not None:
            tokens, ms = longer, await self._counted(self._prefill(longer))
            table.append((tokens, ms))
        return table

    async def _prefill(self, tokens: int) -> float:
        times: list[float] = []
        while _is_repeated(times):
            self._salt = f"calibration {tokens}/{len(times)}"
            async with self._opened(self._salt) as session:
                times.append(await _first_token_ms(session, self._prompt(tokens)))
        return median_low(times)

    def _contexts(self, lengths: Sequence[int]) -> tuple[int, int, int]:
        """A short one, one between and a long one, all of whole blocks, and found in the prefix cache.

        Behind the long one there is room for appends.
        """
        long = min(lengths[-1], self._longest * 3 // 4)
        middle = min(lengths[len(lengths) // 2], long)
        return self._whole_blocks(min(_CONTEXT, long)), self._whole_blocks(middle), self._whole_blocks(long)

    async def _decode(self, context: int) -> TokenTimes:
        """The tokens of one answer alone."""
        async with (
            self._opened(self._salt, context) as session,
            TimedAnswer(session, self._end(_RESTS[0]), _DROPPED + _DECODED) as answer,
        ):
            await answer.until(_is_enough)
        arrivals = answer.arrivals.after(_DROPPED)
        if arrivals.last <= arrivals.first:
            raise EngineError("its tokens came all at once, so that none could be timed.")
        return arrivals

    async def _finalize(self, context: int, rest: int) -> float:
        """Ms to the first token of a prompt whose context is computed."""
        times: list[float] = []
        while _is_repeated(times) and not (times and self._is_late()):
            async with self._opened(self._salt, context) as session:
                times.append(await _first_token_ms(session, self._end(rest)))
        return median_low(times)

    async def _together(self, answers: int, context: int) -> float | None:
        """Ms a token of each of some answers; None where there is no room or time for them."""
        tokens = _DROPPED + _DECODED_TOGETHER
        if answers > self._limits.max_num_seqs or self._is_late():
            return None
        if answers * (context + _RESTS[0] + tokens + self._limits.block_size) > self._limits.kv_tokens:
            return None
        async with AsyncExitStack() as stack:
            # With salts of their own: engines may attend once to what all of them share.
            sessions = [
                await stack.enter_async_context(self._opened(f"calibration answer {number}", context))
                for number in range(answers)
            ]
            timed = [TimedAnswer(session, self._end(_RESTS[0]), tokens) for session in sessions]
            for answer in timed:
                await stack.enter_async_context(answer)
            for answer in timed:
                await answer.until(_is_enough)
        arrivals = [answer.arrivals.after(_DROPPED) for answer in timed]
        begin, end = max(one.first for one in arrivals), min(one.last for one in arrivals)
        steps_ms = [ms for one in arrivals for ms in one.within(begin, end).steps_ms()]
        return usual(steps_ms) if steps_ms else None

    async def _beside(self, context: int, decoded: int, pace: float) -> BesideFigure | None:
        """Appends behind a context that is computed, beside a decode; None where there is no room or time for them.

        Args:
            context: of the appends.
            decoded: of the decode.
            pace: that the decode is kept to.
        """
        limits, figure = self._limits, None
        answered = min(_MOST_ANSWERED, limits.max_model_len - decoded - _RESTS[0])
        most = min(limits.max_model_len - 1, limits.kv_tokens - decoded - answered - 2 * limits.block_size)
        if limits.max_num_seqs < 2 or context + _FIRST_APPEND > most or self._is_late():
            return None
        salt = self._salt if context else f"calibration beside {pace}"
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(self._opened(salt, context))
            decoding = await stack.enter_async_context(self._opened(self._salt, decoded, pace))
            answer = await stack.enter_async_context(TimedAnswer(decoding, self._end(_RESTS[0]), answered))
            await answer.until(lambda arrivals: arrivals.tokens > _DROPPED)
            tokens: int | None = _FIRST_APPEND
            while tokens is not None and tokens <= most - context and not self._is_late():
                begin = time.monotonic()
                try:
                    async with asyncio.timeout(_LONGEST_APPEND_S):
                        await session.append(self._end(tokens))
                except TimeoutError:
                    break
                end = time.monotonic()
                steps_ms = answer.arrivals.within(begin, end).steps_ms()
                if answer.arrivals.tokens == answered:
                    break  # it did not last as long
                if steps_ms:
                    figure = BesideFigure(
                        context=context,
                        tokens=tokens,
                        append_ms=(end - begin) * 1e3,
                        decode_ms=fmean(steps_ms),
                        itl_ratio=pace,
                    )
                context += tokens
                tokens = next_append(tokens, len(steps_ms), most - context)
        return figure

    @asynccontextmanager
    async def _opened(self, salt: str, context: int = 0, pace: float | None = None) -> AsyncIterator[Session]:
        """A session in which the first `context` tokens of the prompt are computed; it ends with the block."""
        session = self._engine.open(
            f"calibration {next(self._numbers)}",
            cache_salt=salt,
            sampling=Sampling(max_tokens=1, ignore_eos=True),
            pace=None if pace is None else DecodePace(itl_ratio=pace),
        )
        try:
            if context:
                await session.append(self._prompt(context))
            yield session
        finally:
            await session.abort()

    def _prompt(self, tokens: int) -> list[int]:
        vocabulary = min(_PLAIN_IDS, self._limits.vocabulary_size)
        return [index % vocabulary for index in range(tokens)]

    def _end(self, tokens: int) -> list[int]:
        """More tokens of a prompt, which no other has in its place."""
        vocabulary, first = min(_PLAIN_IDS, self._limits.vocabulary_size), next(self._numbers)
        return [(first + 7 * index) % vocabulary for index in range(tokens)]

    def _whole_blocks(self, tokens: int) -> int:
        return tokens - tokens % self._limits.block_size

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline


def _is_repeated(times_ms: Sequence[float]) -> bool:
    """Whether something is measured once more."""
    return not times_ms or (len(times_ms) < _REPEATS and sum(times_ms) < _REPEATED_BELOW_S * 1e3)


def _is_enough(arrivals: TokenTimes) -> bool:
    """Whether a slow engine's answer tells enough."""
    timed = arrivals.after(_DROPPED)
    return timed.tokens > _ENOUGH_TOKENS and timed.last - timed.first > _ENOUGH_S


async def _first_token_ms(session: Session, ids: Sequence[int]) -> float:
    """From handing over the rest of a prompt until its first token."""
    async with TimedAnswer(session, ids, 1) as answer:
        await answer.whole()
    return (answer.arrivals.first - answer.begun) * 1e3
