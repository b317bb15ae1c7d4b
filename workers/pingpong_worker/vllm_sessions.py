"""Both kinds of session over vLLM's `AsyncLLM`.

**Prefix-cache session** (the default): every append submits the whole prompt so far with ``max_tokens=1``; what earlier
submissions computed is found in the prefix cache, and the last submission decodes. It pins nothing, supports all
sampling and works on any version. It computes again up to one block each time, and its blocks can be evicted between
appends. Where an append is cancelled, its request is aborted: a step that is already running ends first (nothing can
stop it), and whole blocks that it computes stay in the cache for `finalize`.

**Streaming-input session**: one resumable request that is fed chunk by chunk. It computes nothing twice, and it pins
its KV. A chunk that has been handed over cannot be taken back: after a cancelled append `finalize` queues behind it
inside the engine. vLLM samples one token at the end of every chunk: the acknowledgement, which is thrown away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from pingpong_bus.errors import EngineError
from pingpong_bus.messages import Sampling, SessionKind
from pingpong_worker.engine import OutputTokens
from pingpong_worker.vllm_guessing import counts_of
from pingpong_worker.vllm_handle import Handling, VllmHandle

_log = logging.getLogger("pingpong_worker")


class PrefixCacheSession:
    """Re-submits the growing prompt.

    Args:
        on_close: called when the session is over, once or more often.
    """

    kind: SessionKind = "prefix-cache"

    def __init__(self, handle: VllmHandle, session_id: str, handling: Handling, on_close: Callable[[], None]) -> None:
        self._handle = handle
        self._id = session_id
        self._handling = handling
        self._on_close = on_close
        self._prompt: list[int] = []
        self._requests = 0
        self._aborted = False
        self.on_computed: Callable[[int], object] = lambda _: None
        """See `TellsProgress`."""

    async def append(self, ids: Sequence[int]) -> int | None:
        """See `Session.append`."""
        self._handle.check_prompt(ids, len(self._prompt) + len(ids), 1)
        self._prompt.extend(ids)
        computed: int | None = None
        async with aclosing(self._submit(self._handle.append_params(self._handling))) as outputs:
            async for output in outputs:
                computed = len(self._prompt) - (output.num_cached_tokens or 0)
        return computed

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        """See `Session.finalize`."""
        self._handle.check_prompt(ids, len(self._prompt) + len(ids), sampling.max_tokens)
        self._prompt.extend(ids)
        try:
            async with aclosing(self._submit(self._handle.answer_params(self._handling, sampling))) as outputs:
                async for tokens in answer(outputs):
                    yield tokens
        finally:
            self._on_close()

    def roll_back(self, tokens: int) -> None:
        """See `Session.roll_back`."""
        del self._prompt[tokens:]

    async def abort(self) -> None:
        """See `Session.abort`."""
        self._aborted = True
        try:
            await self._handle.abort(self._request_id())
        finally:
            self._on_close()

    def _submit(self, params: Any) -> AsyncGenerator[Any, None]:
        self._requests += 1
        prompt = self._handle.make_prompt(self._prompt, self._handling.salt)
        return self._handle.generate(prompt, params, self._request_id(), lambda: self._aborted, self._note_computed)

    def _note_computed(self, tokens: int) -> None:
        self.on_computed(tokens)

    def _request_id(self) -> str:
        return f"{self._id}#{self._requests}"


class StreamingInputSession:
    """Feeds one resumable request; greedy sampling only, where appends sample.

    Args:
        on_close: called when the session holds nothing in the engine any more, once or more often.
    """

    kind: SessionKind = "streaming-input"

    def __init__(self, handle: VllmHandle, session_id: str, handling: Handling, on_close: Callable[[], None]) -> None:
        self._handle = handle
        self._id = session_id
        self._handling = handling
        self._on_close = on_close
        self._sent = 0
        self._chunks = 0
        self._samples = 0
        """Sampled tokens received; sample n acknowledges chunk n. Outputs may be merged, so tokens are counted. Where
        appends sample nothing, their ends."""
        self._cached: int | None = None
        self._input: asyncio.Queue[tuple[Any, bool]] = asyncio.Queue()
        self._output: asyncio.Queue[Any] = asyncio.Queue()
        self._pump: asyncio.Task[None] | None = None
        self.on_computed: Callable[[int], object] = lambda _: None
        """See `TellsProgress`."""

    async def append(self, ids: Sequence[int]) -> int | None:
        """See `Session.append`."""
        self._handle.check_prompt(ids, self._sent + len(ids), 1)
        first = self._chunks == 0
        self._feed(ids, self._handle.append_params(self._handling), last=False)
        while self._samples < self._chunks:
            self._samples += self._acknowledged((await self._receive()).outputs[0])
        return len(ids) - (self._cached or 0) if first else len(ids)

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        """See `Session.finalize`. `cached_tokens` is what the first chunk found: vLLM does not count again."""
        self._handle.check_prompt(ids, self._sent + len(ids), sampling.max_tokens)
        self._feed(ids, self._handle.answer_params(self._handling, sampling), last=True)
        try:
            async for tokens in answer(self._last_chunk()):
                yield tokens
        finally:
            await self._close()

    def roll_back(self, tokens: int) -> None:
        """See `Session.roll_back`: its request keeps all that it was given."""
        if tokens < self._sent:
            raise EngineError("a streaming-input session takes nothing back.")

    async def abort(self) -> None:
        """See `Session.abort`."""
        await self._close()

    def _feed(self, ids: Sequence[int], params: Any, *, last: bool) -> None:
        self._sent += len(ids)
        self._chunks += 1
        chunk = self._handle.make_chunk(self._handle.make_prompt(ids, self._handling.salt), params)
        self._input.put_nowait((chunk, last))
        if self._pump is None:
            # A task of its own: cancelling an append must not cancel the request.
            self._pump = asyncio.create_task(self._run(), name=f"session {self._id}")
            self._pump.add_done_callback(self._ended)

    async def _chunks_to_send(self) -> AsyncGenerator[Any, None]:
        last = False
        while not last:
            chunk, last = await self._input.get()
            yield chunk

    async def _run(self) -> None:
        params = self._handle.append_params(self._handling)
        stream = self._handle.generate(
            self._chunks_to_send(), params, self._id, on_computed=lambda tokens: self.on_computed(tokens)
        )
        async with aclosing(stream) as outputs:
            async for output in outputs:
                self._output.put_nowait(output)

    def _acknowledged(self, completion: Any) -> int:
        """How many chunks an output tells the end of, while none decodes."""
        if self._handle.appends_sample:
            return len(completion.token_ids)
        return int(completion.finish_reason is not None)

    def _ended(self, pump: asyncio.Task[None]) -> None:
        """Tell whoever still waits for outputs that none will come, however the request ended."""
        error: BaseException | None = EngineError("the session was aborted.") if pump.cancelled() else pump.exception()
        if error is None:
            error = EngineError("vLLM ended the session before its answer.")
        elif not isinstance(error, EngineError):
            _log.error("session %s failed", self._id, exc_info=error)
            error = self._handle.error(error)
        self._output.put_nowait(error)

    async def _receive(self) -> Any:
        output = await self._output.get()
        if isinstance(output, EngineError):
            self._output.put_nowait(output)  # nothing follows it: for whoever asks again
            raise output
        if self._cached is None:
            self._cached = output.num_cached_tokens
        return output

    async def _last_chunk(self) -> AsyncGenerator[Any, None]:
        """Outputs of the last chunk, without what is left of the appends' samples or ends."""
        while True:
            output = await self._receive()
            completion = output.outputs[0]
            tokens = len(completion.token_ids)
            surplus = 0
            if self._handle.appends_sample:
                surplus = min(tokens, max(0, self._chunks - 1 - self._samples))
                self._samples += tokens
                if self._samples < self._chunks:
                    continue  # the end of an append that had been cancelled
            elif tokens == 0 and self._samples < self._chunks - 1:
                self._samples += 1
                continue  # the same
            else:
                self._samples = self._chunks  # that end may have come together with the answer's beginning
            completion.token_ids = list(completion.token_ids)[surplus:]
            output.num_cached_tokens = self._cached
            yield output
            if completion.finish_reason is not None:
                return

    async def _close(self) -> None:
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.wait([self._pump])
        self._on_close()


async def answer(outputs: AsyncIterator[Any]) -> AsyncGenerator[OutputTokens, None]:
    """Turn vLLM's outputs of one decoding request into ours.

    Raises:
        EngineError: vLLM ended the request for another reason than a stop token or its length.
    """
    first = True
    async for output in outputs:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        reason = completion.finish_reason
        stop: int | None = None
        if reason not in (None, "stop", "length"):
            raise EngineError(f'vLLM ended the request with "{reason}".')
        if reason == "stop" and ids and ids[-1] == completion.stop_reason:
            stop = ids.pop()
        if ids or reason is not None:
            yield OutputTokens(ids, reason, stop, output.num_cached_tokens if first else None, counts_of(output))
            first = False
