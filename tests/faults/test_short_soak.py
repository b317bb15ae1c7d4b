"""A minute of the soak: see `benchmarks/soak.py` for the long one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from faults.service import Service
from faults.soak import Soak
from faults.soak_jobs import SIMULATED, simulated_jobs

CHAINS = 60


async def test_sixty_chains_survive_what_dies_under_them() -> None:
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:
        slow = SIMULATED.replace("step_ms = 1", "step_ms = 8")
        soak = Soak(Service(Path(folder) / "s"), slow, simulated_jobs(CHAINS, 1), at_once=12, kill_every_s=0.3)
        summary = await soak.run()
    assert not summary.faults, "\n".join([*summary.faults, *summary.log])
    assert summary.finished == summary.chains == CHAINS
    assert summary.differing == 0
    assert sum(summary.kills.values()) > 5
