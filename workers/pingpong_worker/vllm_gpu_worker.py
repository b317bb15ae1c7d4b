"""vLLM's GPU worker, with a model runner that checks guessed tokens; only engines that guess have it.

vLLM builds the class from the engine argument `worker_cls`, which is meant for this.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from pingpong_worker.vllm_draft_runner import check_guesses, guessed_tokens


class GuessingGPUWorker(Worker):  # type: ignore[misc]
    """A GPU worker whose steps may hold guesses."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and prepare its runner."""
        super().load_model(*args, **kwargs)
        check_guesses(self.model_runner, guessed_tokens())
