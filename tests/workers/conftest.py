"""One real engine for all tests that need one: starting it takes half a minute."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import AsyncIterator
from unittest import mock

import pytest
import pytest_asyncio

from pingpong_worker.config import WorkerConfig
from pingpong_worker.model_store import EMBEDDED_MODEL
from pingpong_worker.shared_memory_names import PREFIX_VARIABLE, instance_prefix, unlink_segments, worker_prefix
from pingpong_worker.vllm_engine import VllmEngine


def pytest_configure(config: pytest.Config) -> None:
    """vLLM leaves a blocking ZeroMQ context to the collector, which may find it in any later test."""
    config.addinivalue_line("filterwarnings", r"ignore:Unclosed context <zmq\.Context:ResourceWarning")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """The embedded model in float32 on core 0; prompts of more than 256 tokens are prefilled in parts.

    Tests that use it must run in the session's event loop: ``pytest.mark.asyncio(loop_scope="session")``.
    """
    temporary = tmp_path_factory.mktemp("vllm")
    # Where the machine has much to do vLLM kills its processes after 5 s, and what they leave in shared memory is known
    # to this process's resource tracker, which lives on. So they name it as a worker's do.
    segments = worker_prefix(instance_prefix(temporary))
    with mock.patch.dict(os.environ, {"TMPDIR": str(temporary)}):  # and without what the engine sets
        engine = VllmEngine(
            WorkerConfig(
                name="test",
                devices=["cpu:0"],
                model=EMBEDDED_MODEL,
                dtype="float32",
                speculation_tokens=8,  # for tests that ask for guesses; others get none
                engine_args={"max_model_len": 4096, "max_num_batched_tokens": 256},
                slab_fd=-1,
                control="",
                bell="",
                supervisor_pid=0,
            )
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch and vLLM say at import is not ours to mend
            os.environ[PREFIX_VARIABLE] = segments
            try:
                await engine.start()
            finally:
                del os.environ[PREFIX_VARIABLE]  # what other tests start is not the engine's
        try:
            yield engine
        finally:
            await engine.shutdown()
            unlink_segments(segments)
            with warnings.catch_warnings():
                # Here, for the end of the session knows no other filters than pyproject.toml's and fails it.
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
