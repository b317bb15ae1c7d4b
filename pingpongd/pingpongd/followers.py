"""Which clients follow which chains. Pure."""

from __future__ import annotations


class Followers:
    """A table that is read both ways."""

    def __init__(self) -> None:
        self._clients: dict[str, set[bytes]] = {}
        self._chains: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def of(self, chain: str) -> list[bytes]:
        """The clients that follow a chain."""
        return list(self._clients.get(chain, ()))

    def add(self, client: bytes, chain: str) -> None:
        """A client follows a chain from here on."""
        self._clients.setdefault(chain, set()).add(client)
        self._chains.setdefault(client, set()).add(chain)

    def remove(self, client: bytes, chain: str) -> None:
        """It follows it no more; nothing happens where it did not."""
        clients, chains = self._clients.get(chain), self._chains.get(client)
        if clients is None or chains is None:
            return
        clients.discard(client)
        chains.discard(chain)
        if not clients:
            del self._clients[chain]
        if not chains:
            del self._chains[client]

    def drop_client(self, client: bytes) -> None:
        """A client has gone."""
        for chain in list(self._chains.get(client, ())):
            self.remove(client, chain)

    def drop_chain(self, chain: str) -> None:
        """A chain has ended."""
        for client in self.of(chain):
            self.remove(client, chain)
