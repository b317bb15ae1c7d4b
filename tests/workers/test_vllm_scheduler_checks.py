"""What our schedulers rely on is looked up in vLLM's before an engine starts, and one sentence says what is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pingpong_bus.errors import ConfigError

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # what torch and vLLM say at import is not ours to mend


@pytest.fixture(scope="module")
def checks() -> Any:
    from pingpong_worker import vllm_scheduler, vllm_scheduler_checks

    parts = vllm_scheduler_checks.installed_parts()
    return SimpleNamespace(
        module=vllm_scheduler_checks,
        parts=parts,
        faults=lambda **changed: list(
            vllm_scheduler_checks.faults(SimpleNamespace(**(vars(parts) | changed)), vllm_scheduler)
        ),
    )


def test_the_installed_version_is_known(checks: Any) -> None:
    assert checks.faults() == []
    checks.module.check_scheduler()


def test_what_has_changed_is_named(checks: Any) -> None:
    class OtherHook(checks.parts.scheduler):  # type: ignore[misc]
        def _mamba_block_aligned_split(self, tokens: int, request: Any) -> int:
            return tokens

    class OneLoop(checks.parts.scheduler):  # type: ignore[misc]
        def schedule(self) -> None:
            if self.need_mamba_block_aligned_split:
                token_budget = self.max_num_scheduled_tokens
                self._mamba_block_aligned_split(None, token_budget)

    class OtherQueue:
        def add_request(self, request: Any) -> None: ...
        def __iter__(self) -> Any: ...

    class OtherManager(checks.parts.manager):  # type: ignore[misc]
        def get_computed_blocks(self, requests: list[Any]) -> Any: ...

    class SameName(checks.parts.async_scheduler):  # type: ignore[misc]
        def _ledger(self) -> None: ...

    for changed, sentence in (
        ({"scheduler": OtherHook}, "`_mamba_block_aligned_split` takes (tokens, request)"),
        ({"scheduler": OneLoop}, "`schedule` has `self._mamba_block_aligned_split` in 1 places, not in 2"),
        ({"queue": OtherQueue}, "its queues have no `remove_request`"),
        ({"manager": OtherManager}, "`OtherManager.get_computed_blocks` takes (requests)"),
        ({"async_scheduler": SameName}, "it has a `_ledger` of its own"),
        ({"status": SimpleNamespace(__members__={"WAITING": 1})}, "there is no status `PREEMPTED`"),
    ):
        assert sentence in checks.faults(**changed)


def test_a_queue_that_is_not_known_is_refused(checks: Any) -> None:
    class Queues(checks.parts.scheduler):  # type: ignore[misc]
        def __init__(self, create_request_queue: Any) -> None:
            self.waiting = create_request_queue(0)
            self.parked = create_request_queue(0)

    assert "it has a queue `parked`" in checks.faults(scheduler=Queues)


def test_the_refusal_says_what_to_do(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.module, "faults", lambda parts, ours: iter(["it has no `schedule`"]))
    with pytest.raises(
        ConfigError, match=r"does not know the scheduler of vLLM \d+.*: it has no `schedule`\..*enabled"
    ):
        checks.module.check_scheduler()
