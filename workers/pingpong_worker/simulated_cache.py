"""The simulated engine's prefix cache."""

from __future__ import annotations

from collections import OrderedDict

from pingpong_worker.prefix_retention import PrefixRetention


class PrefixCache:
    """Hashes of computed blocks, the least recently used first; holds at most `blocks`.

    As in our schedulers for vLLM, those that `retention` wants kept step aside where they would be evicted, and go only
    where all are of that kind.
    """

    def __init__(self, blocks: int, keep: float = 0.0) -> None:
        self._blocks = blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._aside: set[bytes] = set()
        self._in_use = 0
        self.retention: PrefixRetention[bytes] = PrefixRetention(int(keep * blocks))
        """Which blocks are kept, of the part `keep` that may be."""

    def touch(self, block: bytes) -> bool:
        """Whether the block is there; it becomes the most recently used."""
        if block in self._aside:
            self._aside.remove(block)
            self._known[block] = None
        if block not in self._known:
            return False
        self._known.move_to_end(block)
        return True

    def add(self, block: bytes) -> None:
        """Enter a block, and evict what no longer fits."""
        if self.touch(block):
            return
        self._known[block] = None
        while len(self._known) + len(self._aside) > self._blocks:
            oldest, _ = self._known.popitem(last=False)
            if oldest in self.retention:
                self._aside.add(oldest)
                self._make_room()

    def use(self, blocks: int) -> None:
        """Requests hold so many blocks, which nothing that is kept may take from them."""
        self._in_use = blocks
        self._make_room()

    def keep(self, blocks: list[bytes], reuse: float, cost: float, now: float) -> None:
        """Some blocks, a prompt's first ones, are expected to come again; see `PrefixRetention.note`."""
        if blocks and not self.retention.is_fresh(blocks[-1], reuse, now):
            for block in self.retention.note(blocks, reuse, cost, now):
                if block in self._aside:  # the next to go
                    self._aside.remove(block)
                    self._known[block] = None
                    self._known.move_to_end(block, last=False)

    def _make_room(self) -> None:
        if (excess := len(self._aside) + self._in_use - self._blocks) > 0:
            given = self.retention.least(self._aside, excess)
            self.retention.give_up(given)
            self._aside.difference_update(given)

    def clear(self) -> None:
        """Forget every block."""
        self._known.clear()
        self._aside.clear()
        self.retention.clear()
