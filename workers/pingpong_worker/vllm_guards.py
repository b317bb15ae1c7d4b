"""What vLLM gets wrong, or dies of, and what keeps us out of its way. Each guard has its reason and a test.

Numbers are issues of vllm-project/vllm.

- #54215: a caller's list of prompt ids is extended in place. Prompts hold a copy: `vllm_versions.prompt_maker`.
- A session opened without tokens generates from a phantom prompt. `check_not_empty`; and a session is opened in the
  engine by its first append.
- #39996, #42489: prompt and output above `max_model_len` in a session kill the engine. `check_length`, before anything
  is sent.
- An id outside of the vocabulary kills the engine: without a tokenizer vLLM does not check. `check_vocabulary`.
- A session keeps the random generator of its first chunk, and options that only a later chunk has are ignored, or
  fatal. `session_kind`: only greedy decoding goes into a session, and none that is held to a grid.
- Paused sessions hold KV and are never pre-empted: a decode that needs their blocks spins for ever, and two sessions
  deadlock each other. They count against `max_num_seqs`. One that was pre-empted loses its prompt at the next chunk.
  `Reservations`: a session is granted only where all fit at full length, and beside them every prefix-cache session
  that is open, or one. What remains: prefix-cache sessions are never refused, so that several which open after the
  grant, and grow to nearly the full length all at once, can still make vLLM pre-empt a session.
  Where a patch has them give way (`vllm_abilities.py`) only seats are counted.
- Input closed after the last chunk, with stop tokens: surplus output. `StreamingInputSession` closes with that chunk.
- Outputs of neighbouring chunks are merged. `StreamingInputSession` counts tokens, not outputs.
- A seeded prompt that is prefilled in parts kills an engine on a CPU. `vllm_cpu_worker.SeededCPUWorker`.
- Without a tokenizer vLLM knows only the end-of-sequence ids of the generation configuration. `stop_ids` names all.
- An engine that is told to end (SIGTERM) aborts its requests, and lives on for a while. `VllmHandle.generate` takes an
  abort that nobody has asked for as its end.
- #37842, #49449, in old versions: `vllm_scheduler.SessionFixes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pingpong_bus.errors import EngineError
from pingpong_bus.messages import Sampling, SessionKind


def check_not_empty(ids: Sequence[int]) -> None:
    """Raise EngineError for no tokens at all."""
    if not ids:
        raise EngineError("nothing to append: no token ids were given.", hint="Give at least one.")


def check_vocabulary(ids: Sequence[int], vocabulary_size: int) -> None:
    """Raise EngineError if an id is not in ``0 .. vocabulary_size - 1``."""
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary_size:
        wrong = next(token for token in ids if not 0 <= token < vocabulary_size)
        raise EngineError(
            f"token id {wrong} is not in the model's vocabulary of {vocabulary_size}.",
            hint="Use ids of this model's tokenizer.",
        )


def check_length(prompt_tokens: int, output_tokens: int, max_model_len: int) -> None:
    """Raise EngineError if prompt and output together are longer than the engine can hold, all in tokens."""
    if prompt_tokens + output_tokens > max_model_len:
        raise EngineError(
            f"a prompt of {prompt_tokens} tokens and an output of {output_tokens} do not fit in the engine's "
            f"{max_model_len}.",
            hint="Shorten the prompt, lower max_tokens, or raise `max_model_len` (`[vllm]`, or `vllm` of its model).",
        )


def session_kind(
    wanted: SessionKind,
    sampling: Sampling,
    grid: int | None = None,
    *,
    guessed: bool = False,
    appends_sample: bool = True,
) -> SessionKind:
    """The kind of session that can carry `sampling`: streaming input only without a grid, where no tokens are guessed,
    which was never tried with it, and for greedy decoding, unless appends sample nothing.

    A resumable request keeps what it has computed wherever a chunk ended, and that is off the grid.
    """
    fits = grid is None and not guessed and (sampling.temperature == 0 or not appends_sample)
    return wanted if fits else "prefix-cache"


def stop_ids(sampling: Sampling, end_ids: Iterable[int]) -> list[int]:
    """Ids that end an answer: the request's own, and the model's unless `ignore_eos`."""
    ends = () if sampling.ignore_eos else end_ids
    return sorted({*sampling.stop_token_ids, *ends})


class Reservations:
    """How much KV cache open streaming-input sessions may pin.

    A session's final length is unknown while it grows, so each one counts as the longest. Prefix-cache sessions are
    counted too, for one that decodes competes for blocks, but they are never refused: vLLM can pre-empt them.

    Args:
        kv_tokens: tokens that the KV cache holds.
        max_model_len: tokens of the longest request.
        block_size: tokens of a KV block; requests take whole blocks.
        max_num_seqs: requests that the engine runs at once.
        give_way: whether idle sessions give their memory to whoever needs it (`vllm_abilities.py`): then only seats
            are counted, which they do not give.
    """

    def __init__(
        self, *, kv_tokens: int, max_model_len: int, block_size: int, max_num_seqs: int, give_way: bool = False
    ) -> None:
        longest = -(-max_model_len // block_size) * block_size
        self._fitting = kv_tokens // longest if not give_way else 2 * max_num_seqs
        """Requests of full length that fit in the cache."""
        self._max_num_seqs = max_num_seqs
        self._holders: set[str] = set()
        self._beside: set[str] = set()

    def take(self, session_id: str) -> bool:
        """Reserve for a streaming-input session; False where there is no room, and then it must not be opened."""
        sessions = len(self._holders) + 1
        beside = min(max(1, len(self._beside)), self._max_num_seqs - sessions)  # more cannot run at once
        if sessions > self._max_num_seqs // 2 or sessions + beside > self._fitting:
            return False
        self._holders.add(session_id)
        return True

    def add_beside(self, session_id: str) -> None:
        """A prefix-cache session is open from now on."""
        self._beside.add(session_id)

    def give_back(self, session_id: str) -> None:
        """The session, of either kind, is over; harmless if it is not known."""
        self._holders.discard(session_id)
        self._beside.discard(session_id)
