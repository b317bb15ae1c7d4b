"""The simulated engine's prefix cache."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """Hashes of computed blocks, the least recently used first; holds at most `blocks`."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def touch(self, block: bytes) -> bool:
        """Whether the block is there; it becomes the most recently used."""
        if block not in self._known:
            return False
        self._known.move_to_end(block)
        return True

    def add(self, block: bytes) -> None:
        """Enter a block, and evict what no longer fits."""
        self._known[block] = None
        self._known.move_to_end(block)
        while len(self._known) > self._blocks:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget every block."""
        self._known.clear()
