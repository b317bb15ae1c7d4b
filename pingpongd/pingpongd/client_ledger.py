"""What each client may have in work and unread, so that none starves another or fills memory. Pure.

Sizes are those of encoded frames, in bytes. What a client has not read, the daemon holds: ZeroMQ queues it. `Seen`
says how much it has read.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

_MIB = 1024 * 1024


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may take; beyond it they are told to come back later."""

    clients: int = 1024
    clients_per_user: int = 512
    """Half, so that one user's cannot keep the others' out."""
    requests: int = 1024
    """Of one client, not answered yet."""
    request_bytes: int = 128 * _MIB
    """The same; a first one is taken whatever its size."""
    all_requests: int = 16_384
    all_request_bytes: int = 1024 * _MIB
    unread_messages: int = 10_000
    """Sent to one client and not confirmed."""
    unread_bytes: int = 64 * _MIB
    """The same; to one that has read everything, a message of any size is sent."""
    all_unread_bytes: int = 1024 * _MIB
    """Past this, a client with more than `fair_unread_bytes` gets nothing more."""
    fair_unread_bytes: int = _MIB
    refusals: int = 100
    """Answers that say no and are sent beyond `unread_messages`; after them, silence."""


class Client:
    """One client's account."""

    __slots__ = ("__weakref__", "connection", "request_bytes", "requests", "sent", "uid", "unread", "unread_bytes")

    def __init__(self, connection: int, uid: int) -> None:
        self.connection = connection
        """Its descriptor in the daemon: what tells that it has gone."""
        self.uid = uid
        self.requests = 0
        self.request_bytes = 0
        self.sent = 0
        """Messages, since it connected."""
        self.unread: deque[int] = deque()
        """Sizes of those that it has not confirmed."""
        self.unread_bytes = 0


class ClientLedger:
    """All clients' accounts, by the identity that ZeroMQ gave them."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self.limits = limits or ClientLimits()
        self.requests = 0
        self.request_bytes = 0
        self.unread_bytes = 0
        self._clients: dict[bytes, Client] = {}
        self._by_connection: dict[int, set[bytes]] = {}
        self._users: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._clients

    def account(self, identity: bytes) -> Client | None:
        """A client's account, if it has one."""
        return self._clients.get(identity)

    def admit(self, identity: bytes, connection: int, uid: int) -> str:
        """Open an account, if there is none; why not, or ""."""
        known = self._clients.get(identity)
        if known is not None and known.connection == connection:
            return ""
        if known is not None:
            self.forget(identity)  # it has come back under its name, and counts anew what it reads
        if len(self._clients) >= self.limits.clients:
            return f"{len(self._clients)} clients are connected."
        if self._users[uid] >= self.limits.clients_per_user:
            return f"{self._users[uid]} clients of this user are connected."
        self._clients[identity] = Client(connection, uid)
        self._by_connection.setdefault(connection, set()).add(identity)
        self._users[uid] += 1
        return ""

    def refusal(self, identity: bytes, size: int) -> str:
        """Why one more request of this size is not taken from a client, or ""."""
        client, limits = self._clients[identity], self.limits
        if self._full(client, 0):
            return f"this client has not read {len(client.unread)} messages ({client.unread_bytes} bytes)."
        if client.requests >= limits.requests:
            return f"{client.requests} requests of this client wait for their answers."
        if client.requests and client.request_bytes + size > limits.request_bytes:
            return f"requests of this client hold {client.request_bytes} bytes."
        if self.requests >= limits.all_requests or (
            self.requests and self.request_bytes + size > limits.all_request_bytes
        ):
            return f"{self.requests} requests ({self.request_bytes} bytes) wait for their answers."
        return ""

    def begin(self, identity: bytes, size: int) -> Client:
        """A request is taken; `end` ends it, also where the client has gone by then."""
        client = self._clients[identity]
        client.requests += 1
        client.request_bytes += size
        self.requests += 1
        self.request_bytes += size
        return client

    def end(self, client: Client, size: int) -> None:
        """A request is answered, or has failed."""
        client.requests -= 1
        client.request_bytes -= size
        self.requests -= 1
        self.request_bytes -= size

    def may_send(self, identity: bytes, size: int, *, refusal: bool = False) -> bool:
        """Whether a message may be queued for a client; `refusal`: a small one that says no."""
        client = self._clients.get(identity)
        if client is None:
            return False
        if refusal:
            return len(client.unread) < self.limits.unread_messages + self.limits.refusals
        return not self._full(client, size)

    def sent(self, identity: bytes, size: int) -> None:
        """A message was queued for a client."""
        client = self._clients[identity]
        client.sent += 1
        client.unread.append(size)
        client.unread_bytes += size
        self.unread_bytes += size

    def seen(self, identity: bytes, messages: int) -> None:
        """A client has read so many messages, since it connected."""
        client = self._clients[identity]
        for _ in range(min(messages - (client.sent - len(client.unread)), len(client.unread))):
            size = client.unread.popleft()
            client.unread_bytes -= size
            self.unread_bytes -= size

    def gone(self, connection: int) -> list[bytes]:
        """Close the accounts of a connection that is lost; whose they were."""
        found = list(self._by_connection.get(connection, ()))
        for identity in found:
            self.forget(identity)
        return found

    def forget(self, identity: bytes) -> None:
        """Close an account; nothing happens where there is none."""
        client = self._clients.pop(identity, None)
        if client is None:
            return
        identities = self._by_connection[client.connection]
        identities.discard(identity)
        if not identities:
            del self._by_connection[client.connection]
        self._users[client.uid] -= 1
        if not self._users[client.uid]:
            del self._users[client.uid]
        self.unread_bytes -= client.unread_bytes
        client.unread_bytes = 0
        client.unread.clear()

    def _full(self, client: Client, size: int) -> bool:
        """Whether a client has to read before a message of `size` is queued for it."""
        limits = self.limits
        if not client.unread:
            return False
        return (
            len(client.unread) >= limits.unread_messages
            or client.unread_bytes + size > limits.unread_bytes
            or (self.unread_bytes + size > limits.all_unread_bytes and client.unread_bytes > limits.fair_unread_bytes)
        )
