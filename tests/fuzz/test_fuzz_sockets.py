"""A short run of `benchmarks/fuzz_sockets.py`, and that it can fail."""

from __future__ import annotations

import msgspec

from fuzz_frames import CLIENT_FRAMES, SUBSCRIPTIONS, WORKER_FRAMES, Frames
from fuzz_sockets import Attack, Footprint, Outcome, fuzz


async def test_malformed_frames_on_every_socket_leave_the_daemon_as_it_was() -> None:
    outcome = await fuzz(6000, seed=7)
    assert not outcome.problems
    assert {attack.socket for attack in outcome.attacks} == {"control.sock", "workers.sock", "bus-a.sock", "bus-b.sock"}
    assert all(sum(attack.sent.values()) >= attack.frames for attack in outcome.attacks)
    assert all(count > 500 for count in outcome.refused_frames.values())
    # Ten seconds of attack are logged in a few lines, whatever comes.
    assert outcome.log_lines.get("frame_refused", 0) <= 4 * (1 + outcome.seconds / 10)


def test_a_leak_a_death_and_a_wrong_chain_are_problems() -> None:
    footprint = Footprint(rss_mib=50.0, descriptors=30)
    fine = Outcome(
        frames=1,
        seconds=1.0,
        attacks=[Attack(socket="s", frames=1, sent={}, exit_code=0)],
        refused_frames={},
        log_lines={},
        chains=3,
        wrong_chains=0,
        before={"daemon": footprint},
        after={"daemon": footprint},
    )
    assert not fine.problems
    for change in (
        {"wrong_chains": 1},
        {"chains": 0},
        {"after": {}},
        {"after": {"daemon": Footprint(rss_mib=50.0, descriptors=31)}},
        {"after": {"daemon": Footprint(rss_mib=500.0, descriptors=30)}},
        {"attacks": [Attack(socket="s", frames=1, sent={}, exit_code=1)]},
    ):
        assert len(msgspec.structs.replace(fine, **change).problems) == 1


def test_the_same_seed_gives_the_same_frames() -> None:
    for whole in (CLIENT_FRAMES, WORKER_FRAMES, SUBSCRIPTIONS):
        one, two = Frames(3), Frames(3)
        assert [one.message(whole) for _ in range(300)] == [two.message(whole) for _ in range(300)]
        assert [one.stream(b"DEALER") for _ in range(30)] == [two.stream(b"DEALER") for _ in range(30)]
