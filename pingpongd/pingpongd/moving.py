"""Whether a hop leaves a group whose tokens come late, to go on elsewhere. Pure.

It has to be behind what series would have taken, and to be through sooner elsewhere, where its prompt and what it has
written are prefilled anew. Two things keep hops from being sent to and fro: a move has to gain clearly, and a hop is
moved `MOST_MOVES` times at most.

How long a group will stay slow nobody knows. It is taken to last as long again as it has lasted, or as long as such
spells have lasted there on the average: what a hop that stays can lose to a spell that goes on is then at most about
what it loses to a move that was for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pingpongd.engine_cost import EngineCost

MOST_MOVES = 2
"""Of one agent, in the whole of its run."""
WORTH = 0.1
"""A move has to gain this part of what the hop would take where it is."""
WORTH_MS = 50.0
"""And so much: a hop that is sent takes some milliseconds that no figure knows of."""
FIRST_SPELL_MS = 2000.0
"""How long a group is expected to stay slow of which nothing is known yet."""
SPELL_WEIGHT = 0.3
"""Of the latest spell in the mean of a group's."""


class Seat(msgspec.Struct, frozen=True):
    """A group, as a hop on it or on its way there sees it."""

    cost: EngineCost
    """Of its engine as it was measured."""
    writers: int
    """Hops that decode on it; of the one that the hop is on, itself among them."""
    slowdown: float = 1.0
    """What its steps take now over what they should."""
    lasts_ms: float = 0.0
    """For how long it is expected to stay slow."""
    queued_ms: float = 0.0
    """Prefill of others that comes first."""


class Spells:
    """How long a group is slow, when it is; times in ns, by any clock that only grows."""

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._mean_ms: float | None = None

    def began(self, now_ns: int) -> None:
        """It is slow; harmless where that is known."""
        self._since_ns = now_ns if self._since_ns is None else self._since_ns

    def ended(self, now_ns: int) -> None:
        """It is slow no more; harmless where that is known."""
        if self._since_ns is None:
            return
        lasted = max(0.0, (now_ns - self._since_ns) / 1e6)
        self._mean_ms = lasted if self._mean_ms is None else self._mean_ms + SPELL_WEIGHT * (lasted - self._mean_ms)
        self._since_ns = None

    def left_ms(self, now_ns: int) -> float:
        """How much longer it is expected to stay slow."""
        lasted = 0.0 if self._since_ns is None else (now_ns - self._since_ns) / 1e6
        return max(lasted, FIRST_SPELL_MS if self._mean_ms is None else self._mean_ms)


class LateHop(msgspec.Struct, frozen=True):
    """A hop that decodes on a degraded group."""

    hop: str
    group: str
    prompt: int
    """Tokens of its prompt."""
    written: int
    """Tokens of its agent's output so far."""
    left: int
    """Tokens that it has still to write, at most."""
    series_ms: float
    """From now on, when it would have ended had its chain run in series; below 0 where that is past."""
    held: Mapping[str, int]
    """By group that can take it now: tokens of its prompt that are in the prefix cache there."""
    replays: bool = False
    """What it has written is decoded again, not prefilled: its output is to be exact."""
    moves: int = 0
    """How often it was moved already."""
    pace: tuple[float, float] = (1.0, 1.0)
    """See `ChainShape.paces`: tokens that a step gives it, and rows that it takes up."""


class Move(msgspec.Struct, frozen=True):
    """A hop that is to go elsewhere."""

    hop: str
    to: str
    stay_ms: float
    """What it was predicted to take where it is."""
    there_ms: float
    """What it was predicted to take elsewhere."""


def stay_ms(hop: LateHop, seat: Seat) -> float:
    """What is left of a hop where it is: at the present pace for as long as that is expected to last, then at the usual
    one."""
    usual = hop.left * _token_ms(hop, seat, max(0, seat.writers - 1))
    slow = max(1.0, seat.slowdown)
    return min(usual * slow, usual + seat.lasts_ms * (1.0 - 1.0 / slow))


def there_ms(hop: LateHop, seat: Seat, held: int) -> float:
    """The same on another group.

    Args:
        hop: the hop.
        seat: the group that it would go to.
        held: tokens of its prompt that are cached there.
    """
    return seat.queued_ms + _begin_ms(hop, seat, held) + _token_ms(hop, seat, seat.writers) * hop.left


def moves(hops: Sequence[LateHop], seats: Mapping[str, Seat]) -> list[Move]:
    """The hops that are to go elsewhere, the one that gains most first; each move counts for those after it.

    Args:
        hops: on degraded groups.
        seats: these groups, and those that hops can go to.
    """
    now, left, found = dict(seats), list(hops), list[Move]()
    while left:
        best = max((_best(hop, now) for hop in left), key=lambda option: option[0])
        if best[0] <= 0.0:
            break
        _, hop, move = best
        found.append(move)
        left.remove(hop)
        here, there = now[hop.group], now[move.to]
        now[hop.group] = msgspec.structs.replace(here, writers=here.writers - 1)
        now[move.to] = msgspec.structs.replace(
            there, writers=there.writers + 1, queued_ms=there.queued_ms + _begin_ms(hop, there, hop.held[move.to])
        )
    return found


def _best(hop: LateHop, seats: Mapping[str, Seat]) -> tuple[float, LateHop, Move]:
    """What the best move of a hop gains beyond what it has to, in ms; 0 or less: it stays."""
    here = stay_ms(hop, seats[hop.group])
    found = (0.0, hop, Move(hop.hop, hop.group, here, here))
    if hop.moves >= MOST_MOVES or here <= hop.series_ms:
        return found
    for name, held in hop.held.items():
        seat = seats[name]
        there = there_ms(hop, seat, held)
        # Those that decode there stand still while it is taken in: nobody gains at the cost of all.
        gain = here - there - seat.writers * _begin_ms(hop, seat, held)
        found = max(found, (gain - max(WORTH * here, WORTH_MS), hop, Move(hop.hop, name, here, there)), key=_first)
    return found


def _first(option: tuple[float, LateHop, Move]) -> float:
    return option[0]


def _begin_ms(hop: LateHop, seat: Seat, held: int) -> float:
    """Until a hop goes on decoding elsewhere: others wait for the prefill in it."""
    known = hop.prompt if hop.replays else hop.prompt + hop.written
    held = min(held, known - 1)
    again = hop.written * _token_ms(hop, seat, seat.writers) if hop.replays else 0.0
    return seat.cost.first_token_ms(held, known - held) + again


def _token_ms(hop: LateHop, seat: Seat, beside: int) -> float:
    """Of a hop that decodes with so many others on a group."""
    tokens, rows = hop.pace
    return seat.cost.decode_ms(hop.prompt + hop.written + hop.left / 2, beside + rows) / tokens
