"""What our schedulers rely on is looked up in vLLM's before an engine starts, and one sentence says what is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pingpong_bus.errors import ConfigError
from pingpong_worker.config import WorkerConfig

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


@pytest.mark.parametrize(
    ("fields", "tokens", "looked_up"),
    [
        ({}, "0", ["scheduler", "retention"]),
        ({"keep_prefixes": 0.0}, "0", ["scheduler"]),
        ({"keep_prefixes": 0.0}, "8", ["scheduler", "guesses"]),
        ({"decode_first": False}, "0", []),
    ],
)
def test_what_an_engine_is_to_do_is_looked_up_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], tokens: str, looked_up: list[str]
) -> None:
    from pingpong_worker import vllm_start

    seen: list[str] = []
    monkeypatch.setenv(vllm_start.GUESS_VARIABLE, tokens)
    for name, word in (
        ("check_scheduler", "scheduler"),
        ("check_retention", "retention"),
        ("check_guesses_known", "guesses"),
    ):
        monkeypatch.setattr(vllm_start, name, lambda word=word, **_: seen.append(word))
    worker = WorkerConfig(
        name="w",
        devices=["cpu:0"],
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=0,
        **{"keep_prefixes": 0.5} | fields,
    )
    vllm_start.check_vllm(worker)
    assert seen == looked_up
