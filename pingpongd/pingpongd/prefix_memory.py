"""What a group's prefix cache holds. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMemory:
    """Which static prefixes a group's prefix cache holds: the latest computed there, as far as its KV cache reaches.

    As in vLLM's cache, of what was used at the same time the end goes first: a document that several prompts begin
    with stays longest.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._room = kv_tokens
        self._held: OrderedDict[str, int] = OrderedDict()
        """Tokens that each rung adds to the one before, by digest; the oldest first."""
        self._used = 0
        self._frozen: frozenset[str] | None = frozenset()
        """What `held` gives; None after a change."""

    def computed(self, rungs: Sequence[tuple[str, int]], total_tokens: int) -> None:
        """A hop has computed `total_tokens`.

        Args:
            rungs: of the prefix that they begin with; see `ChainShape.rungs`.
            total_tokens: prompt and output.
        """
        self._frozen = None
        before = [0, *(length for _, length in rungs)]
        added = [(digest, length - start) for (digest, length), start in zip(rungs, before, strict=False)]
        if added:
            digest, tokens = added[-1]
            added[-1] = digest, tokens + max(0, total_tokens - before[-1])
        for digest, tokens in reversed(added):
            self._used += tokens - self._held.pop(digest, 0)
            self._held[digest] = tokens
        while self._used > self._room and self._held:
            self._used -= self._held.popitem(last=False)[1]

    def forget(self) -> None:
        """The cache was reset or its engine replaced."""
        self._held.clear()
        self._used, self._frozen = 0, frozenset()

    @property
    def held(self) -> frozenset[str]:
        """Digests of the prefixes that are held."""
        if self._frozen is None:
            self._frozen = frozenset(self._held)
        return self._frozen
