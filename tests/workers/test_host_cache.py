"""Host memory behind the prefix cache: who can have it, how much, and what goes there."""

from __future__ import annotations

from typing import Any

import pytest

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import KeptPrefix
from pingpong_worker.config import WorkerConfig
from pingpong_worker.host_cache import offload_arguments
from pingpong_worker.vllm_handle import Handling
from pingpong_worker.vllm_marks import KEEP_VARIABLE
from pingpong_worker.vllm_settings import engine_environment
from pingpongd.check_machine import judge_host_cache, judge_shm
from pingpongd.config import parse_config
from pingpongd.devices import check_groups

GIB = 2**30


def worker(**more: Any) -> WorkerConfig:
    usual = {"devices": ["cuda:0"], "host_cache_gib": 16.0}
    return WorkerConfig(name="g", model="m", slab_fd=-1, control="", bell="", supervisor_pid=0, **(usual | more))  # type: ignore[arg-type]


def arguments(available: float = 100.0, shm: float = 100.0, **more: Any) -> dict[str, Any]:
    return offload_arguments(worker(**more), lambda: int(available * GIB), lambda: int(shm * GIB))


def test_vllm_is_asked_for_its_own_offloading() -> None:
    assert arguments() == {"kv_offloading_size": 16.0, "kv_offloading_backend": "native"}
    assert arguments(host_cache_gib=0.0) == {}
    assert arguments(0.0, 0.0, host_cache_gib=0.0, devices=["cpu:0"]) == {}, "and nothing is looked at without it"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"devices": ["cpu:0"]}, "CPU cores has its KV cache in host memory already"),
        ({"session": "streaming-input"}, "streaming-input"),
        ({"engine_args": {"kv_transfer_config": {}}}, r"vllm\.kv_transfer_config` says already"),
        ({"engine_args": {"kv_offloading_size": 1}}, r"vllm\.kv_offloading_size` says already"),
        ({"available": 17.0}, r"16 GiB of host memory are to hold prefixes, and 17\.0 GiB memory is available"),
        ({"shm": 0.0625}, r"and 0\.1 GiB is free in /dev/shm"),
    ],
)
def test_who_cannot_have_it_is_told_why(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        arguments(**more)
    assert caught.value.field == "prefixes.host_gib"
    assert caught.value.hint


def test_only_what_is_expected_back_goes_to_the_host() -> None:
    kept = KeptPrefix(tokens=640, reuse=2.0)
    assert Handling(keep=kept).marks() == {"pingpong": {"keep": [640, 2.0]}}
    assert Handling(keep=kept, host_cache=True).marks(append=True) == {
        "pingpong": {"append": True, "keep": [640, 2.0]},
        "kv_transfer_params": {"max_offload_tokens": 640},
    }
    assert Handling(host_cache=True).marks()["kv_transfer_params"] == {"max_offload_tokens": 0}


def test_the_engines_process_is_told_what_may_be_kept() -> None:
    config = worker(devices=["cpu:0"], keep_prefixes=0.25)
    assert engine_environment(config, {KEEP_VARIABLE: "0.9"})[KEEP_VARIABLE] == "0.25"


def test_a_daemon_on_cores_refuses_it_before_anything_starts() -> None:
    config = parse_config({"groups": [{"name": "a", "devices": ["cpu:0"]}], "prefixes": {"host_gib": 1.0}})
    with pytest.raises(ConfigError, match='group "a": an engine on CPU cores') as caught:
        check_groups(config)
    assert caught.value.field == "prefixes.host_gib"


def test_the_check_command_judges_it_by_the_machine() -> None:
    assert judge_host_cache(80 * GIB, 100 * GIB).level == "ok"
    assert judge_host_cache(95 * GIB, 100 * GIB).level == "error"
    assert judge_shm(20 * GIB, 1, 16.0).level == "ok"
    assert judge_shm(20 * GIB, 2, 16.0).level == "warning"
