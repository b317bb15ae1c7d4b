"""Stands for vLLM's model runner: a "model" whose next token depends on everything that the KV cache holds before it.

What a position holds is a digest of all tokens up to it. Computing a token reads the digest of the position before
through the request's block table, as attention reads keys and values; so a block that was freed too early, handed out
twice or found under a wrong hash gives other tokens, or is seen at once. Each block also keeps how it was computed,
for requests whose prompts must be cut on a grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 503
STOP_IDS = frozenset(range(3, 24))
"""About one sampled token in twenty-four."""
_SEED = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class WrongContent(AssertionError):
    """The scheduler had the runner compute on what is not there."""


def chained(digest: int, token: int) -> int:
    """The digest of a position, from the one before and its token."""
    return ((digest ^ (token + 1)) * 0x2545F4914F6CDD1D + _SEED) & _MASK


def sampled(digest: int) -> int:
    """What follows a position."""
    return 3 + (digest >> 23) % (VOCABULARY - 3)


def reference(prompt: Iterable[int], max_tokens: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """The tokens that have to follow `prompt`; a stop token is the last one."""
    digest = _SEED
    for token in prompt:
        digest = chained(digest, token)
    found: list[int] = []
    while len(found) < max_tokens and not (found and found[-1] in stop_ids):
        found.append(sampled(digest))
        digest = chained(digest, found[-1])
    return found


@dataclass
class _Row:
    """A request as the runner knows it."""

    tokens: list[int]
    prompt_tokens: int
    blocks: list[int]
    digests: list[int] = field(default_factory=list)

    def digest(self, position: int) -> int:
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else _SEED
            self.digests.append(chained(before, self.tokens[len(self.digests)]))
        return self.digests[position]


class KvCheckingRunner:
    """Carries out `SchedulerOutput`s, in order.

    Args:
        block_size: tokens of a KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._rows: dict[str, _Row] = {}
        self._digests: dict[int, list[int]] = {}
        """By block: of each position."""
        self._chunks: dict[int, tuple[int, int]] = {}
        """By block: first and one past the last token of the chunk in which its last token was computed."""
        self.grids: dict[str, int] = {}
        """Cells of requests that have one."""
        self.guessed = self.accepted = 0
        """Tokens that were guessed by the scheduler, and those of them that were right."""

    def run(self, output: Any) -> tuple[list[str], list[list[int]]]:
        """Ids in the step, and what was sampled for each: nothing while its prompt is not computed to the end.

        Raises:
            WrongContent: a block does not hold what the request has computed, or its prompt is not cut on its grid.
        """
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        starts = self._learn(output)
        ids = list(output.num_scheduled_tokens)
        guesses = output.scheduled_spec_decode_tokens
        return ids, [
            self._compute(name, starts[name], output.num_scheduled_tokens[name], guesses.get(name, ())) for name in ids
        ]

    def _learn(self, output: Any) -> dict[str, int]:
        """Take in new requests and blocks; gives what is computed of each request."""
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = list(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids)
            # One that samples nothing is told with a token more, which is never computed.
            prompt_tokens = len(new.prompt_token_ids) - (new.sampling_params.max_tokens == 0)
            self._rows[new.req_id] = _Row(tokens, prompt_tokens, list(new.block_ids[0]))
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self._rows[name]
            if name in cached.resumed_req_ids:
                row.blocks.clear()
            row.blocks += blocks[0] if blocks else ()
            starts[name] = computed
        return starts

    def _compute(self, name: str, start: int, count: int, guess: Sequence[int]) -> list[int]:
        row, end = self._rows[name], start + count
        if guess and start + 1 != len(row.tokens):
            raise WrongContent(f"{name}: guesses behind token {start}, and {len(row.tokens)} are known")
        row.tokens += guess
        if end > len(row.tokens):
            raise WrongContent(f"{name}: token {end} of {len(row.tokens)} is to be computed")
        if end > len(row.blocks) * self._size:
            raise WrongContent(f"{name}: {len(row.blocks)} blocks for {end} tokens")
        self._check_context(name, row, start)
        if grid := self.grids.get(name):
            self._check_cells(name, row, start, end, grid)
        for position in range(start, end):
            block = row.blocks[position // self._size]
            held = self._digests.setdefault(block, [0] * self._size)
            held[position % self._size] = row.digest(position)
            if (position + 1) % self._size == 0:
                self._chunks[block] = (start, end)
        if end < len(row.tokens):
            return []
        return self._sample(row, end - len(guess), guess)

    def _sample(self, row: _Row, known: int, guess: Sequence[int]) -> list[int]:
        """What follows the known tokens: one token, and one more for each guess that is right."""
        found = [sampled(row.digest(known - 1))]
        for ahead, token in enumerate(guess):
            if token != found[-1]:
                break
            found.append(sampled(row.digest(known + ahead)))
        del row.tokens[known:], row.digests[known:]
        row.tokens += found
        self.guessed += len(guess)
        self.accepted += len(found) - 1
        return found

    def _check_context(self, name: str, row: _Row, start: int) -> None:
        for last in self._last_positions(start):
            held = self._digests.get(row.blocks[last // self._size])
            if held is None or held[last % self._size] != row.digest(last):
                raise WrongContent(f"{name}: the block of token {last} holds something else")

    def _last_positions(self, start: int) -> Sequence[int]:
        """The last computed position in each block."""
        ends = list(range(self._size - 1, start, self._size))
        return ends if start % self._size == 0 else [*ends, start - 1]

    def _check_cells(self, name: str, row: _Row, start: int, end: int, grid: int) -> None:
        """That a chunk of a prompt is one cell, and that what it builds on was computed in whole cells."""
        if start >= row.prompt_tokens:
            return
        if start % grid or (end % grid and end < row.prompt_tokens) or end - start > grid:
            raise WrongContent(f"{name}: tokens {start} to {end} are no cell of {grid}")
        for first in range(0, start, grid):
            for position in range(first, first + grid, self._size):
                if self._chunks[row.blocks[position // self._size]] != (first, first + grid):
                    raise WrongContent(f"{name}: the block of token {position} was not computed in a cell of {grid}")
