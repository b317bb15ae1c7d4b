"""Which hops leave a group whose tokens come late."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_figures import H200
from pingpongd.engine_cost import EngineCost, slowed
from pingpongd.moving import (
    FIRST_SPELL_MS,
    MOST_MOVES,
    SPELL_WEIGHT,
    LateHop,
    Seat,
    Spells,
    moves,
    stay_ms,
    there_ms,
)

COST = EngineCost(H200)
LATE = LateHop(hop="h", group="b", prompt=4352, written=20, left=236, series_ms=0.0, held={"a": 0})


def seats(slowdown: float = 2.0, lasts_ms: float = 60_000.0, *, there: int = 0) -> dict[str, Seat]:
    return {"a": Seat(COST, there), "b": Seat(COST, 1, slowdown, lasts_ms)}


def test_a_hop_that_is_behind_series_goes_where_it_is_through_sooner() -> None:
    (move,) = moves([LATE], seats())
    assert move.to == "a"
    assert move.stay_ms == pytest.approx(236 * COST.decode_ms(4490, 1) * 2)
    # A prompt of 4,352 tokens takes 206 ms cold; the usual step is 8.6 ms.
    assert move.there_ms == pytest.approx(206 + 236 * 8.6, rel=0.02)


def test_a_hop_that_is_ahead_of_series_stays() -> None:
    assert moves([msgspec.structs.replace(LATE, series_ms=5_000.0)], seats()) == []


def test_a_hop_that_is_nearly_through_stays() -> None:
    assert moves([msgspec.structs.replace(LATE, left=20, written=236)], seats()) == []


def test_a_short_spell_is_sat_out_and_a_long_one_is_not() -> None:
    assert moves([LATE], seats(lasts_ms=200.0)) == []
    assert moves([LATE], seats(lasts_ms=2_000.0))


def test_what_a_cache_holds_there_makes_a_move_worth_it() -> None:
    few = msgspec.structs.replace(LATE, prompt=12544, left=70)
    assert moves([few], seats()) == []
    assert moves([msgspec.structs.replace(few, held={"a": 12544})], seats())


def test_those_that_decode_there_are_counted() -> None:
    assert moves([LATE], seats(there=1))
    assert moves([LATE], seats(there=8)) == []  # each of them would stand still for 206 ms


def test_what_was_written_is_decoded_again_where_the_output_is_to_be_exact() -> None:
    half = msgspec.structs.replace(LATE, written=128, left=128)
    assert moves([half], seats())
    assert moves([msgspec.structs.replace(half, replays=True)], seats()) == []


def test_a_hop_is_moved_only_so_often() -> None:
    assert moves([msgspec.structs.replace(LATE, moves=MOST_MOVES - 1)], seats())
    assert moves([msgspec.structs.replace(LATE, moves=MOST_MOVES)], seats()) == []


def test_a_move_counts_for_those_after_it() -> None:
    many = [msgspec.structs.replace(LATE, hop=f"h{at}") for at in range(12)]
    crowd = seats() | {"b": Seat(COST, 12, 2.0, 60_000.0)}
    found = moves(many, crowd)
    assert 0 < len(found) < 12
    assert len({move.hop for move in found}) == len(found)
    assert [move.there_ms for move in found] == sorted(move.there_ms for move in found)


def test_a_spell_is_expected_to_last_as_long_again_or_as_spells_do() -> None:
    spells, second = Spells(), 1_000_000_000
    assert spells.left_ms(0) == FIRST_SPELL_MS
    spells.began(10 * second)
    spells.began(12 * second)
    assert spells.left_ms(11 * second) == FIRST_SPELL_MS
    assert spells.left_ms(19 * second) == 9_000.0
    spells.ended(20 * second)
    spells.ended(40 * second)
    assert spells.left_ms(50 * second) == 10_000.0
    spells.began(60 * second)
    spells.ended(59 * second)  # it was over before it was noticed
    assert spells.left_ms(70 * second) == pytest.approx(10_000.0 * (1 - SPELL_WEIGHT))


@given(
    slowdown=st.floats(1.0, 20.0),
    lasts=st.floats(0.0, 60_000.0),
    left=st.integers(0, 5_000),
    written=st.integers(1, 5_000),
    there=st.integers(0, 8),
    replays=st.booleans(),
)
def test_no_move_is_predicted_to_lose(
    slowdown: float, lasts: float, left: int, written: int, there: int, replays: bool
) -> None:
    hop = msgspec.structs.replace(LATE, left=left, written=written, replays=replays, series_ms=-1.0)
    at = seats(slowdown, lasts, there=there)
    for move in moves([hop], at):
        assert move.there_ms == there_ms(hop, at["a"], 0) < move.stay_ms == stay_ms(hop, at["b"])
    # What the hop has still to write takes neither less than usual nor more than at the present pace all along.
    usual = left * COST.decode_ms(hop.prompt + written + left / 2, 1)
    assert usual <= stay_ms(hop, at["b"]) <= usual * slowdown * 1.0001


def test_slowed_figures_slow_all_that_is_predicted_from_them() -> None:
    slow = EngineCost(slowed(H200, 2.0))
    assert slow.decode_ms(6000, 3) == pytest.approx(2 * COST.decode_ms(6000, 3))
    assert slow.first_token_ms(0, 5000) == pytest.approx(2 * COST.first_token_ms(0, 5000))
    assert slow.first_token_ms(8000, 30) == pytest.approx(2 * COST.first_token_ms(8000, 30))
    assert slow.riding.ride(0, 2000, inner=False).ms == pytest.approx(2 * COST.riding.ride(0, 2000, inner=False).ms)
