"""Clients' accounts: whatever they do, the sums are right and the limits hold."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pingpongd.client_ledger import Client, ClientLedger, ClientLimits

LIMITS = ClientLimits(
    clients=4,
    clients_per_user=3,
    requests=3,
    request_bytes=100,
    all_requests=7,
    all_request_bytes=150,
    unread_messages=5,
    unread_bytes=80,
    all_unread_bytes=120,
    fair_unread_bytes=20,
    refusals=2,
)
identities = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
sizes = st.integers(1, 90)


class LedgerMachine(RuleBasedStateMachine):
    """Clients come, ask, are answered, read and go, in any order; a model of each account is kept beside."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ClientLedger(LIMITS)
        self.users: dict[bytes, tuple[int, int]] = {}
        self.begun: list[tuple[Client, int]] = []
        self.queued: dict[bytes, deque[int]] = {}
        self.read: dict[bytes, int] = {}

    @rule(identity=identities, connection=st.integers(10, 15), uid=st.integers(1, 2))
    def come(self, identity: bytes, connection: int, uid: int) -> None:
        known = self.users.get(identity)
        if known is not None and known[0] == connection:
            assert self.ledger.admit(identity, connection, uid) == ""
            return
        self._forget(identity)
        of_user = sum(user == uid for _, user in self.users.values())
        fits = len(self.users) < LIMITS.clients and of_user < LIMITS.clients_per_user
        assert (self.ledger.admit(identity, connection, uid) == "") == fits
        if fits:
            self.users[identity] = (connection, uid)
            self.queued[identity], self.read[identity] = deque(), 0

    @rule(connection=st.integers(10, 15))
    def leave(self, connection: int) -> None:
        expected = {identity for identity, (at, _) in self.users.items() if at == connection}
        assert set(self.ledger.gone(connection)) == expected
        for identity in expected:
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        for table in (self.users, self.queued, self.read):
            table.pop(identity, None)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), size=sizes)
    def ask(self, data: st.DataObject, size: int) -> None:
        identity = data.draw(st.sampled_from(sorted(self.users)))
        if not self.ledger.refusal(identity, size):
            self.begun.append((self.ledger.begin(identity, size), size))

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        client, size = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        self.ledger.end(client, size)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), size=sizes, refusal=st.booleans())
    def send(self, data: st.DataObject, size: int, refusal: bool) -> None:
        identity = data.draw(st.sampled_from(sorted(self.users)))
        if self.ledger.may_send(identity, size, refusal=refusal):
            self.ledger.sent(identity, size)
            self.queued[identity].append(size)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), claimed=st.integers(0, 30))
    def confirm(self, data: st.DataObject, claimed: int) -> None:
        identity = data.draw(st.sampled_from(sorted(self.users)))
        self.ledger.seen(identity, claimed)
        while self.queued[identity] and self.read[identity] < claimed:
            self.queued[identity].popleft()
            self.read[identity] += 1

    @invariant()
    def sums_are_right_and_limits_hold(self) -> None:
        assert len(self.ledger) == len(self.users) <= LIMITS.clients
        assert self.ledger.requests == len(self.begun) <= LIMITS.all_requests
        assert self.ledger.request_bytes == sum(size for _, size in self.begun)
        assert self.ledger.unread_bytes == sum(map(sum, self.queued.values()))
        for identity, queued in self.queued.items():
            account = self.ledger.account(identity)
            assert account is not None
            assert list(account.unread) == list(queued)
            assert account.unread_bytes == sum(queued)
            assert len(queued) <= LIMITS.unread_messages + LIMITS.refusals
            assert account.requests <= LIMITS.requests


TestLedger = LedgerMachine.TestCase


def test_a_client_that_has_read_everything_is_sent_a_message_of_any_size() -> None:
    ledger = ClientLedger(LIMITS)
    ledger.admit(b"a", 1, 1)
    assert ledger.may_send(b"a", 10_000)
    ledger.sent(b"a", 10_000)
    assert not ledger.may_send(b"a", 1)
    assert ledger.refusal(b"a", 1)
    ledger.seen(b"a", 1)
    assert ledger.may_send(b"a", 1)
    assert not ledger.refusal(b"a", 1)


def test_whoever_holds_most_is_stopped_first_where_all_together_hold_too_much() -> None:
    ledger = ClientLedger(LIMITS)
    for identity, held in ((b"a", 60), (b"b", 55), (b"c", 5)):
        ledger.admit(identity, ord(identity), ord(identity))
        ledger.sent(identity, held)
    assert not ledger.may_send(b"a", 10)
    assert ledger.may_send(b"c", 10)


@given(st.lists(st.tuples(identities, st.integers(10, 12)), max_size=20))
def test_one_user_cannot_keep_others_out(arrivals: list[tuple[bytes, int]]) -> None:
    ledger = ClientLedger(LIMITS)
    for identity, connection in arrivals:
        ledger.admit(identity, connection, 1)
    assert ledger.admit(b"somebody", 99, 2) == ""


def test_nobody_is_remembered_once_gone() -> None:
    ledger = ClientLedger(LIMITS)
    for number in range(100):
        assert ledger.admit(b"%d" % number, number, number) == ""
        ledger.sent(b"%d" % number, 10)
        ledger.gone(number)
    assert len(ledger) == ledger.unread_bytes == 0
    assert not ledger.may_send(b"1", 1)
