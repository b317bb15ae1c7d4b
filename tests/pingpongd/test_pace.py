"""What is dear is asked seldom."""

from __future__ import annotations

import pytest

from pingpongd.pace import Budget, Pace


@pytest.mark.parametrize(
    ("cpu_s", "pause_s"),
    [(0.0, 2.0), (0.0001, 2.0), (0.02, 20.0)],
)
def test_a_question_takes_its_part_of_a_core(cpu_s: float, pause_s: float) -> None:
    pace = Pace(share=0.001, floor_s=2.0)
    assert pace.due(5.0)
    pace.spent(5.0, cpu_s)
    assert not pace.due(5.0 + 0.99 * pause_s)
    assert pace.due(5.0 + 1.01 * pause_s)


def test_what_was_saved_may_be_used_at_once_and_no_more() -> None:
    budget = Budget(share=0.004, saved_s=5.0)
    assert budget.spent(0.0, 0.020) == 0.0  # to find the busiest threads takes longer than a usual look
    assert budget.spent(1.0, 0.003) == 0.0
    assert budget.spent(2.0, 0.013) == pytest.approx(2.0)
    assert budget.spent(1000.0, 0.021) == pytest.approx(0.25)  # more than five seconds are not saved


def test_in_the_long_run_it_is_the_share() -> None:
    budget, now, used = Budget(share=0.004), 0.0, 0.0
    while now < 1000.0:
        now += max(0.5, budget.spent(now, 0.008))
        used += 0.008
    assert used / now == pytest.approx(0.004, rel=0.02)
