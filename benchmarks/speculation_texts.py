"""Inputs of the chains that `speculation.py` runs: one a round, so that a known chain has other inputs each time."""

from __future__ import annotations

from typing import Final

INPUTS: Final[dict[str, tuple[str, ...]]] = {
    "copying": (
        (
            "The harbour of Lindau opened in 1856. Its lighthouse is 33 metres high and stands on the "
            "western pier. Every summer some 40,000 visitors climb the 139 steps to the top. From there they"
            " see the old town and the lake."
        ),
        (
            "Maria bought a used bicycle for 120 euros last Saturday. The front wheel was bent, and the bell"
            " did not work. Her neighbour, who repairs clocks, straightened the wheel in ten minutes. On "
            "Sunday she rode along the river."
        ),
        (
            "The quick brown fox jumps over the lazy dog near the river bank. In the morning, the farmer "
            "walks to the market to sell apples, pears and plums. His daughter helps him to carry the "
            "baskets, and they sing old songs."
        ),
        (
            "Our bakery opens at six in the morning. We bake rye bread, rolls and a cake of the day. On "
            "Fridays there are pretzels with butter. Regular customers may pay at the end of the month. We "
            "are closed on Mondays."
        ),
        (
            "The train to Bregenz leaves from platform four at 14:32. It stops in Ravensburg and "
            "Friedrichshafen. Bicycles travel in the last carriage. Tickets are sold at the counter and on "
            "board. The journey takes two hours."
        ),
        (
            "Tomatoes need sun, warmth and water every day. Plant them in May, when the nights are mild. Tie"
            " the stems to a stick, and break off the side shoots. The first fruits are ripe in July. Do not"
            " keep them in the fridge."
        ),
    ),
    "not_copying": (
        "a robot who learns to paint",
        "two clocks that disagree",
        "the last day of school",
        "a baker who cannot smell",
        "a train without a driver",
        "a garden on the moon",
    ),
}
