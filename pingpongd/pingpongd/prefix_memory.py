"""What a group's prefix cache holds. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pingpong_bus.messages import KeptPrefix
from pingpong_worker.prefix_retention import PrefixRetention

_RUNG = 64
"""Tokens that a rung mostly adds; what may be kept is counted in rungs."""


class PrefixMemory:
    """Which static prefixes a group's prefix cache holds: the latest computed there, as far as its KV cache reaches.

    As in vLLM's cache, of what was used at the same time the end goes first: a document that several prompts begin
    with stays longest. As in our scheduler, what is expected back stays behind what is not; and where the engine has
    host memory, that comes back from there.

    Args:
        kv_tokens: that the KV cache holds.
        keep_tokens: of them, those that may be kept; see `EngineLimits.keep_tokens`.
        host_tokens: that the host's memory holds of what is expected back.
    """

    def __init__(self, kv_tokens: int, keep_tokens: int = 0, host_tokens: int = 0) -> None:
        self._room = kv_tokens
        self._held: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Tokens that each rung adds to the one before, by digest, and with what was computed behind the last one; the
        oldest first."""
        self._used = 0
        self._kept: dict[str, int] = {}
        """Of those that were used, the ones that stay."""
        self._retention: PrefixRetention[str] = PrefixRetention(keep_tokens // _RUNG)
        self._host = PrefixMemory(host_tokens) if host_tokens else None
        self._frozen: frozenset[str] | None = frozenset()
        """What `held` gives; None after a change."""

    def computed(
        self, rungs: Sequence[tuple[str, int]], total_tokens: int, keep: KeptPrefix | None = None, now: float = 0.0
    ) -> None:
        """A hop has computed `total_tokens`.

        Args:
            rungs: of the prefix that they begin with; see `ChainShape.rungs`.
            total_tokens: prompt and output.
            keep: how much of it is expected back.
            now: in seconds; of matter only with `keep`.
        """
        self._frozen = None
        before = [0, *(length for _, length in rungs)]
        added = [(digest, length - start) for (digest, length), start in zip(rungs, before, strict=False)]
        behind = max(0, total_tokens - before[-1])
        for digest, tokens in reversed(added):
            _, old = self._held.pop(digest, (0, 0))
            self._used += tokens + behind - old - self._kept.pop(digest, 0)
            self._held[digest] = tokens, tokens + behind
            behind = 0
        if keep is not None:
            self._expect([rung for rung in rungs if rung[1] <= keep.tokens], keep, now)
        while self._used > self._room and (self._held or self._kept):
            self._evict()

    def forget(self) -> None:
        """The cache was reset or its engine replaced."""
        self._held.clear()
        self._kept.clear()
        self._retention.clear()
        if self._host is not None:
            self._host.forget()
        self._used, self._frozen = 0, frozenset()

    @property
    def held(self) -> frozenset[str]:
        """Digests of the prefixes that are held."""
        if self._frozen is None:
            self._frozen = frozenset([*self._held, *self._kept, *(self._host.held if self._host is not None else ())])
        return self._frozen

    def _expect(self, rungs: Sequence[tuple[str, int]], keep: KeptPrefix, now: float) -> None:
        if not rungs:
            return
        # In tokens: what engines pay for them is theirs to know, and of prefixes that are alike it is alike.
        for digest in self._retention.note([digest for digest, _ in rungs], keep.reuse, rungs[-1][1], now):
            if (tokens := self._kept.pop(digest, None)) is not None:
                self._held[digest] = tokens, tokens
                self._held.move_to_end(digest, last=False)
        if self._host is not None:
            self._host.computed(rungs, rungs[-1][1])

    def _evict(self) -> None:
        if not self._held:
            digest = self._retention.least(self._kept, 1)[0]
            self._retention.give_up([digest])
            self._used -= self._kept.pop(digest)
            return
        digest, (tokens, with_rest) = self._held.popitem(last=False)
        self._used -= with_rest
        if digest in self._retention:
            self._kept[digest] = tokens
            self._used += tokens
