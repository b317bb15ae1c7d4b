"""A running vLLM engine as sessions see it: how its version wants to be spoken to, and what its errors mean."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from pingpong_bus.errors import EngineError, EngineLost
from pingpong_bus.messages import DecodePace, EngineLimits, KeptPrefix, Sampling
from pingpong_worker.host_cache import offload_params
from pingpong_worker.vllm_abilities import APPEND_WITHOUT_SAMPLING, PREFILL_PROGRESS
from pingpong_worker.vllm_guards import check_length, check_not_empty, check_vocabulary, stop_ids
from pingpong_worker.vllm_marks import APPEND, DRAFT_TOKENS, DRAFTS, GRID, ITL_RATIO, ITL_TARGET_MS, KEEP, KEY, SESSION

_DIED_HINT = "The worker's log has the reason."


class Handling(msgspec.Struct, frozen=True, kw_only=True):
    """How the scheduler is to handle the requests of one session."""

    cache_salt: str | None = None
    """Where set, prefix-cache entries are shared only with sessions of the same salt."""
    pace: DecodePace = DecodePace()
    """How much appends of others may slow its decoding."""
    grid: int | None = None
    """Its prompt is cut at multiples of this many tokens; None: anywhere."""
    session: str | None = None
    """The session, where each of its requests begins with the prompt of the one before."""
    keep: KeptPrefix | None = None
    """How much of its prompt's beginning is expected to come again."""
    drafts: list[list[int]] | None = None
    """What its tokens may be guessed from, beside its prompt; None: they are not."""
    draft_tokens: int = 0
    """The most that are guessed for a step."""
    host_cache: bool = False
    """Whether the engine has host memory for what it keeps: then that alone goes there."""

    @property
    def salt(self) -> str | None:
        """The salt of its requests. On a grid it is one of the grid's own, for blocks that were computed in other
        shapes hold other bits."""
        if self.grid is None:
            return self.cache_salt
        return f"{self.cache_salt}/grid{self.grid}" if self.cache_salt else f"grid{self.grid}"

    def marks(self, *, append: bool = False, decodes: bool = False) -> dict[str, dict[str, Any]]:
        """`SamplingParams.extra_args` of one of its requests; `vllm_marks.py` says what they mean.

        Args:
            append: it computes part of a prompt ahead of its answer.
            decodes: it answers.
        """
        marks: dict[str, Any] = {}
        if append:
            marks[APPEND] = True
        if self.grid is not None:
            marks[GRID] = self.grid
        if self.session is not None:
            marks[SESSION] = self.session
        if self.keep is not None:
            marks[KEEP] = [self.keep.tokens, self.keep.reuse]
        if decodes:
            marks[ITL_RATIO] = self.pace.itl_ratio
            if self.pace.itl_target_ms is not None:
                marks[ITL_TARGET_MS] = self.pace.itl_target_ms
            if self.drafts is not None:
                marks[DRAFTS], marks[DRAFT_TOKENS] = self.drafts, self.draft_tokens
        if self.host_cache:
            return {KEY: marks, **offload_params(self.keep.tokens if self.keep is not None else 0)}
        return {KEY: marks}


@dataclass
class VllmHandle:
    """A running engine, and how its version wants to be spoken to."""

    llm: Any
    """The `AsyncLLM`."""
    limits: EngineLimits
    end_ids: frozenset[int]
    """The model's own end-of-sequence ids."""
    make_prompt: Callable[[Sequence[int], str | None], Any]
    make_params: Callable[..., Any]
    """`SamplingParams` with what every request of ours has."""
    make_chunk: Callable[[Any, Any], Any]
    """`StreamingInput`."""
    refusals: tuple[type[Exception], ...]
    shutting_down: bool = False
    """The engine has ended a request that nobody had aborted: it was told to end, and will be dead soon."""

    def check(self) -> None:
        """Raise EngineLost if the engine is dead, or about to be."""
        if self.llm.errored:
            raise EngineLost("the engine has died.", hint=_DIED_HINT)
        if self.shutting_down:
            raise EngineLost("the engine was told to shut down.", hint=_DIED_HINT)

    @property
    def appends_sample(self) -> bool:
        """Whether an append samples a token, which is thrown away: stock vLLM does nothing without."""
        return APPEND_WITHOUT_SAMPLING not in self.limits.abilities

    def append_params(self, handling: Handling) -> Any:
        """Greedy, one token if any, never a stop: it only says that the prefill is through."""
        tokens = 1 if self.appends_sample else 0
        return self.make_params(
            max_tokens=tokens, temperature=0.0, extra_args=handling.marks(append=True), **self._progress()
        )

    def answer_params(self, handling: Handling, sampling: Sampling) -> Any:
        """Of the request that decodes. Stop strings are the worker's business: it looks for them outside."""
        return self.make_params(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=stop_ids(sampling, self.end_ids),
            extra_args=handling.marks(decodes=True),
            **self._progress(),
        )

    def _progress(self) -> dict[str, bool]:
        """Asks for word of each step that computes a part of a prompt, where there is such a thing."""
        return {"prefill_progress": True} if PREFILL_PROGRESS in self.limits.abilities else {}

    def score_params(self, handling: Handling, tokens: Sequence[int]) -> Any:
        """Of a request for the log probabilities of `tokens`, each at most once, behind its prompt."""
        return self.make_params(
            max_tokens=1,
            temperature=0.0,
            logprobs=len(tokens),
            logprob_token_ids=list(tokens),
            extra_args=handling.marks(),
        )

    def check_prompt(self, ids: Sequence[int], prompt_tokens: int, output_tokens: int) -> None:
        """The guards that hold for every submission: `ids` new tokens, and the lengths with them."""
        check_not_empty(ids)
        check_vocabulary(ids, self.limits.vocabulary_size)
        # A prompt that was joined as text may be longer than it was counted: past the KV cache it would wait for ever.
        check_length(prompt_tokens, output_tokens, min(self.limits.max_model_len, self.limits.kv_tokens))

    async def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        aborted: Callable[[], bool] = lambda: False,
        on_computed: Callable[[int], object] = lambda _: None,
    ) -> AsyncGenerator[Any, None]:
        """`AsyncLLM.generate` with our errors; closing it aborts the request.

        Args:
            prompt: ids, or a stream of chunks.
            params: of the request.
            request_id: unique among those that run.
            aborted: whether we have aborted it by `abort`: the engine then says that it has ended it.
            on_computed: is told how many tokens of the prompt are computed, whenever there are more; only an engine
                that reports progress says so.
        """
        computed = 0
        try:
            async with aclosing(self.llm.generate(prompt, params, request_id)) as outputs:
                async for output in outputs:
                    if output.outputs[0].finish_reason == "abort":
                        if aborted():
                            raise EngineError("the session was aborted.")
                        self.shutting_down = True
                        self.check()
                    if (known := getattr(output, "num_computed_tokens", None) or 0) > computed:
                        computed = known
                        on_computed(known)
                        if not output.outputs[0].token_ids and output.outputs[0].finish_reason is None:
                            continue  # word of progress, and nothing else
                    yield output
        except self.refusals as error:
            raise self.error(error) from error

    async def abort(self, request_id: str) -> None:
        """Abort a request; harmless where it is over, or the engine gone."""
        try:
            await self.llm.abort(request_id)
        except self.refusals as error:
            if not isinstance(found := self.error(error), EngineLost):
                raise found from error

    def error(self, error: BaseException) -> EngineError:
        """What to tell of an exception that vLLM raised for a request."""
        if self.llm.errored or type(error).__name__ == "EngineDeadError":
            return EngineLost("the engine has died.", hint=_DIED_HINT)
        cause = error.__cause__ if type(error).__name__ == "EngineGenerateError" and error.__cause__ else error
        return EngineError(f"vLLM refused or failed the request: {cause}.")
