"""vLLM's schedulers with two faults of streaming-input sessions mended, for the versions that have them.

Which version gets which class is said in `vllm_versions.py`; the engine's process imports this file by name.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class SessionFixes:
    """Mixin: what the next chunk of a session must change in its request, and an old vLLM leaves.

    - A chunk's `max_tokens` never reached the request, so the last chunk, which decodes, gave as many tokens as the
      first, an append: one (vllm-project/vllm#37842).
    - The sampled token that is thrown away at a chunk's end may have filled a block. Its hash stayed, and the block's
      real content was later found under the wrong hash (vllm-project/vllm#49449).
    """

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        block_size = getattr(self, "hash_block_size", None) or self.block_size  # type: ignore[attr-defined]
        del session.block_hashes[session.num_computed_tokens // block_size :]
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        session.max_tokens = update.max_tokens


class SessionScheduler(SessionFixes, Scheduler):  # type: ignore[misc]
    """For engines that schedule one step at a time: CPUs."""


class AsyncSessionScheduler(SessionFixes, AsyncScheduler):  # type: ignore[misc]
    """For engines that plan a step before the last one's result is in: GPUs."""
