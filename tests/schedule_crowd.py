"""Who submits requests in a random schedule: each actor knows what it must be answered."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from kv_checking_runner import STOP_IDS, VOCABULARY, reference
from schedule_engine import APPEND_TOKENS, LONGEST, make_request
from schedule_world import Violation, World

_WORDS = random.Random(7)
_TEXTS = [[_WORDS.randrange(24, VOCABULARY) for _ in range(LONGEST)] for _ in range(3)]
"""Prompts begin like one of these, so that the prefix cache finds something."""


class Actor:
    """Submits from some step on, and compares what comes back.

    Args:
        world: the engine.
        name: unique; requests are named after it.
    """

    def __init__(self, world: World, name: str) -> None:
        rng = world.rng
        self.world = world
        self.name = name
        crowded = world.setup.crowded
        self.starts = rng.randrange(0, 20 if crowded else rng.choice((20, 120)))
        self.aborts = self.starts + rng.randrange(1, 80) if rng.random() < 0.15 else None
        self.done = False
        self.got: list[int] = []
        self.max_tokens = rng.randrange(100, 300) if crowded else rng.randrange(1, rng.choice((10, 40, 160)))
        self.stops = rng.random() < (0.1 if crowded else 0.3)
        self.prompt = self._words(rng.randrange(1, rng.choice((60, LONGEST - self.max_tokens))))
        self.mark: dict[str, Any] | None = None
        if rng.random() < 0.7:
            self.mark = {"itl_ratio": rng.choice((1.05, 1.3, 2.0, 4.0))}
            if rng.random() < 0.2:
                self.mark["itl_target_ms"] = rng.choice((5.0, 12.0, 30.0))
        keep = random.Random(f"{name} {len(self.prompt)} {self.starts}")  # other draws stay as they are
        self.keep: dict[str, Any] = {}
        if keep.random() < 0.5:
            self.keep["keep"] = [keep.randrange(1, len(self.prompt) + 1), keep.uniform(0.1, 20.0)]

        self.guesses: dict[str, Any] = {}
        if keep.random() < 0.4:
            self.guesses = {"drafts": self._runs(keep), "draft_tokens": keep.choice((1, 3, 8, 20))}

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.name}: {len(self.got)} of {self.max_tokens}"

    def act(self) -> None:
        """Do what is due in this step."""
        if self.done or self.world.steps < self.starts:
            return
        if self.aborts is not None and self.world.steps >= self.aborts:
            self.done = True
            self.abort()
            return
        self.work()

    def work(self) -> None:
        """Submit what is due."""
        raise NotImplementedError

    def abort(self) -> None:
        """End what runs; it may not have been submitted."""
        raise NotImplementedError

    def receive(self, output: Any) -> None:
        """Take in an engine's output, if it is for this actor."""
        raise NotImplementedError

    def finish(self, reason: Any) -> None:
        """The answer is over."""
        stop_ids = STOP_IDS if self.stops else frozenset()
        expected = reference(self.prompt, self.max_tokens, stop_ids)
        if self.got != expected:
            raise Violation(f"{self.name} was answered {self.got}, not {expected} ({reason})")
        self.done = True

    def _marked(self, mark: dict[str, Any] | None) -> dict[str, Any] | None:
        return {**(mark or {}), **self.keep} or None

    def _runs(self, rng: random.Random) -> list[list[int]]:
        """What may be guessed from: answers that are like the right one, more or less."""
        right = reference(self.prompt, self.max_tokens)
        runs = [list(right) for _ in range(rng.randrange(0, 3))]
        for run in runs:
            for _ in range(rng.randrange(0, 1 + len(run) // 5)):
                at = rng.randrange(len(run) + 1)
                run[at : at + rng.randrange(0, 3)] = [rng.randrange(24, VOCABULARY)] * rng.randrange(0, 3)
        return [run for run in runs if run]

    def _words(self, count: int) -> list[int]:
        rng = self.world.rng
        text = rng.choice(_TEXTS)
        common = min(count, rng.randrange(0, LONGEST))
        return text[:common] + [rng.randrange(24, VOCABULARY) for _ in range(count - common)]

    def _pieces(self) -> list[list[int]]:
        """The prompt, cut into two and more."""
        rng, size = self.world.rng, len(self.prompt)
        cuts = sorted({rng.randrange(1, size) for _ in range(rng.randrange(1, 9))}) if size > 1 else []
        edges = [0, *cuts, size]
        return [self.prompt[a:b] for a, b in itertools.pairwise(edges)]


class Plain(Actor):
    """One request."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._submitted = False
        self.grid = world.rng.choice(world.setup.grids) if world.rng.random() < 0.2 else 0

    def work(self) -> None:
        if self._submitted:
            return
        self._submitted = True
        mark, salt = self._marked({**(self.mark or {}), **({} if self.grid else self.guesses)}), None
        if self.grid:
            mark, salt = {**(mark or {}), "grid": self.grid}, f"grid{self.grid}"
        request = make_request(
            self.name, self.prompt, self.max_tokens, mark=mark, stops=self.stops, salt=salt, now=self.world.now
        )
        self.world.submit(request, grid=self.grid)

    def abort(self) -> None:
        self.world.abort(self.name)

    def receive(self, output: Any) -> None:
        if output.request_id != self.name or self.done:
            return
        self.got += output.new_token_ids
        if output.finish_reason is not None:
            self.finish(output.finish_reason)


class Session(Actor):
    """Re-submits its growing prompt: appends one by one, some of them cut off, then the answer."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        rng = world.rng
        self.grid = rng.choice(world.setup.grids) if rng.random() < 0.4 else 0
        self._ends = list(itertools.accumulate(map(len, self._pieces())))
        if self.grid and rng.random() < 0.5:  # half of them append in whole cells
            size = len(self.prompt)
            self._ends = [*sorted({end - end % self.grid for end in self._ends[:-1]} - {0, size}), size]
        self._turn = -1
        self._pending: str | None = None
        self._cuts_off = rng.random() < 0.3

    def work(self) -> None:
        if self._pending is None:
            self._submit()
        elif self._cuts_off and self._turn < len(self._ends) - 1 and self.world.rng.random() < 0.05:
            self.world.abort(self._pending)
            self._pending = None

    def _submit(self) -> None:
        self._turn += 1
        last = self._turn == len(self._ends) - 1
        self._pending = f"{self.name}#{self._turn}"
        guesses = {} if self.grid else self.guesses
        mark = self._marked({**(self.mark or {}), **guesses} if last else {"append": True}) or {}
        if self.grid:
            mark["grid"] = self.grid
        request = make_request(
            self._pending,
            self.prompt[: self._ends[self._turn]],
            self.max_tokens if last else APPEND_TOKENS,
            mark=mark,
            stops=self.stops and last,
            salt=f"grid{self.grid}" if self.grid else None,
            now=self.world.now,
        )
        self.world.submit(request, append=not last, grid=self.grid)

    def abort(self) -> None:
        if self._pending is not None:
            self.world.abort(self._pending)

    def receive(self, output: Any) -> None:
        if output.request_id != self._pending or self.done:
            return
        if self._turn == len(self._ends) - 1:
            self.got += output.new_token_ids
            if output.finish_reason is not None:
                self.finish(output.finish_reason)
        elif output.finish_reason is not None:
            if len(output.new_token_ids) != APPEND_TOKENS:
                raise Violation(f"{self.name}: an append gave {output.new_token_ids}")
            self.world.appends.pop(output.request_id, None)
            self._pending = None


class Stream(Actor):
    """One resumable request, fed chunk by chunk; some chunks queue behind the one before."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._chunks = self._pieces()
        self._sent = 0
        self._samples = 0
        self._hurries = world.rng.random() < 0.3

    def work(self) -> None:
        if self._sent == len(self._chunks) or (self._samples < self._sent and not self._hurries):
            return
        if self.world.rng.random() < 0.5:
            return
        last = self._sent == len(self._chunks) - 1
        mark = self._marked(self.mark if last else {"append": True})
        chunk = make_request(
            self.name,
            self._chunks[self._sent],
            self.max_tokens if last else APPEND_TOKENS,
            mark=mark,
            stops=self.stops and last,
            resumable=True,
            now=self.world.now,
        )
        self._sent += 1
        if last:
            self.world.appends.pop(self.name, None)
            self.world.submit(chunk)
            self.world.submit(make_request(self.name, [0], 1))  # the input's end
        elif self._samples == self._sent - 1:
            self.world.submit(chunk, append=True)
        else:
            self.world.submit(chunk)

    def abort(self) -> None:
        self.world.abort(self.name)

    def receive(self, output: Any) -> None:
        if output.request_id != self.name or self.done:
            return
        tokens = list(output.new_token_ids)
        appends = min(len(tokens), max(0, len(self._chunks) - 1 - self._samples))
        if APPEND_TOKENS == 0:  # its end is its sign
            ended = output.finish_reason is not None and self._samples < len(self._chunks) - 1
            if ended and tokens:
                raise Violation(f"{self.name}: an append gave {tokens}")
            self._samples += 1 if ended else len(tokens)
            if ended:
                self._note_append()
            self.got += tokens
            if not ended and output.finish_reason is not None:
                self.finish(output.finish_reason)
            return
        self._samples += len(tokens)
        if appends:
            self._note_append()
        self.got += tokens[appends:]
        # The last append's end is told as an end too, where the last chunk was queued behind it.
        if output.finish_reason is not None and self._samples >= len(self._chunks):
            self.finish(output.finish_reason)

    def _note_append(self) -> None:
        """An append is through; another may have been queued behind it."""
        if self._samples >= self._sent:
            self.world.appends.pop(self.name, None)
        elif self._sent < len(self._chunks):
            self.world.appends[self.name] = self.world.steps


def make_crowd(world: World) -> list[Actor]:
    """Three to nine actors."""
    rng = world.rng
    kinds: Sequence[type[Actor]] = (Plain, Session, Session, Stream) if world.setup.streaming else (Plain, Session)
    return [rng.choice(kinds)(world, f"{index}") for index in range(rng.randrange(3, 10))]


def run_to_end(world: World, crowd: Sequence[Actor], most_steps: int) -> None:
    """Step until everybody is done, and see that nothing is left.

    Raises:
        Violation: not within so many steps.
    """
    while not (world.at_rest and all(one.done for one in crowd)):
        for one in crowd:
            one.act()
        for output in world.step():
            for one in crowd:
                one.receive(output)
        if world.steps > most_steps:
            raise Violation(f"no end after {most_steps} steps: {[one for one in crowd if not one.done]}")
    world.scheduler.schedule()  # tells the runner of the last ends
    world.check_empty()
