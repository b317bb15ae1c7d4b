"""A request of the simulated engine, and the rule for its next token."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence

from pingpong_bus.messages import DecodePace, KeptPrefix, Sampling

EOS = 257
"""The token that ends an answer; `<|im_end|>` in `simulated_prompts.py`."""

_ALPHABET = b"etaoinshrdlucmfwypvbgkjqxz     .\n"
_EOS_ONE_IN = 128


class Request:
    """One request: its ids, and how many of them are computed."""

    def __init__(self, request: str, salt: str | None, grid: int | None = None, keep: KeptPrefix | None = None) -> None:
        self.id = request
        self.grid = grid
        self.keep = keep
        self.pace = DecodePace()
        self.is_append = False
        self.ids: list[int] = []
        self.prompt_tokens = 0
        self.computed = 0
        self.cached_tokens = 0
        self.sampling: Sampling | None = None
        self.admitted = False
        self.ended = False
        self.reserved_blocks = 0
        self.block_hashes: list[bytes] = []
        self.salt = (salt or "").encode()
        self._digest = hashlib.blake2b(digest_size=8)

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        self.ids.extend(ids)
        self._digest.update(_pack(ids))

    @property
    def outputs(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_tokens

    @property
    def outputs_left(self) -> int:
        """Tokens that may still be sampled; of a request that is not to be answered, none."""
        return self.sampling.max_tokens - self.outputs if self.sampling is not None else 0

    @property
    def left(self) -> int:
        """Tokens that are not computed."""
        return len(self.ids) - self.computed

    @property
    def cacheable(self) -> int:
        """Tokens, of those computed, that may enter the prefix cache."""
        if self.grid is None:
            return self.computed
        whole = min(self.computed, self.prompt_tokens)
        return whole - whole % self.grid

    def chunk(self, room: int) -> int:
        """How many of `room` tokens it can compute in one step: up to the end of its cell, or nothing."""
        if self.grid is None or self.outputs > 0:
            return min(room, self.left)
        cell = min(self.grid - self.computed % self.grid, self.left)
        return cell if cell <= room else 0

    def block_hash(self, block: int, size: int) -> bytes:
        """Hash of a full block and of all before it; blocks are asked for in order."""
        while len(self.block_hashes) <= block:
            at = len(self.block_hashes) * size
            before = self.block_hashes[-1] if self.block_hashes else self.salt
            self.block_hashes.append(hashlib.blake2b(before + _pack(self.ids[at : at + size]), digest_size=16).digest())
        return self.block_hashes[block]

    def sample(self, sampling: Sampling) -> int:
        """The next token: a pure function of every id before it, and of the seed where there is a temperature."""
        digest = self._digest
        if sampling.temperature > 0:
            digest = digest.copy()
            digest.update(repr((sampling.temperature, sampling.top_p, sampling.seed)).encode())
        value = int.from_bytes(digest.digest(), "little")
        if not sampling.ignore_eos and (value >> 32) % _EOS_ONE_IN == 0:
            return EOS
        return _ALPHABET[value % len(_ALPHABET)]


def next_logprob(ids: Sequence[int], token: int) -> float | None:
    """How likely a token is to follow, by the rule that `Request.sample` draws by; None for one that never does.

    The greedy token has a probability of one half; each other one less, as a function of the ids and the token.
    """
    request = Request("", None)
    request.extend(ids)
    if request.sample(Sampling(max_tokens=1)) == token:
        return math.log(0.5)
    if token != EOS and not (token < EOS and token in _ALPHABET):
        return None
    request.extend([token])
    return math.log(0.5) - 1 - request.sample(Sampling(max_tokens=1)) / 256


def _pack(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
