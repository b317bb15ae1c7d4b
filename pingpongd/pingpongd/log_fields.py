"""The fields of log lines: a name means the same in every event. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple


class Field(NamedTuple):
    """What a field says."""

    unit: str
    """Its unit, or its kind where it has none."""
    text: str


COMMON: Final = {
    "event": Field("text", "the event's name: one of the headings below"),
    "level": Field("text", "debug, info, warning, error or critical"),
    "timestamp": Field("ISO 8601, UTC", "when the line was written, to the microsecond"),
    "suppressed": Field("lines", "of this event and key that were held back since the last one that was written"),
    "exception": Field("text", "a fault's trace; what it quotes at length is left out"),
}
"""Of every line; the last two only where there is something to say."""

FIELDS: Final = {
    # who
    "chain": Field("id", "the chain, as `submit` printed it"),
    "agent": Field("name", "the agent, by its name in the chain"),
    "hop": Field("id", "one attempt to run an agent: CHAIN/AGENT/NUMBER"),
    "worker": Field("name", "the device group, and the worker that serves it"),
    "devices": Field("list of ids", "its devices: GPUs by UUID where it is known, cores as cpu:0"),
    "groups": Field("list of names", "the device groups that a chain ran on"),
    "group": Field("name", "the device group, as `worker`"),
    "to": Field("name", "the worker that takes over"),
    "episode": Field("id", "one stretch of late tokens on one worker; the same in all of its lines"),
    "instance": Field("name", "the daemon's instance"),
    "pid": Field("id", "of the process"),
    "peer": Field("id", "who sent it, as far as that is known"),
    "socket": Field("path", "the socket"),
    "host": Field("name", "a host, by name or address"),
    "port": Field("number", "a TCP port"),
    "path": Field("path", "the file or folder"),
    "name": Field("text", "of the chain, as its author gave it"),
    # why and how
    "cause": Field("word", "why tokens come late; see [jitter.md](monitoring/jitter.md)"),
    "was": Field("word", "what it was before"),
    "why": Field("text", "the reason, in a sentence"),
    "reason": Field("text", "the reason, in a sentence"),
    "error": Field("text", "what went wrong, in a sentence; null where nothing did"),
    "code": Field("word", "the error's stable name, such as EngineError"),
    "hint": Field("text", "the way out, in a sentence"),
    "effect": Field("text", "what follows from it"),
    "evidence": Field("map", "what was measured, by name with unit, such as sm_mhz"),
    "state": Field("word", "the state that was reached"),
    "phase": Field("word", "how far its agent was: dispatched, reading, writing, resuming, ..."),
    "how": Field("word", "ask, wait, terminate or kill: how it is ended"),
    "permanent": Field("bool", "whether another start cannot work either"),
    "request": Field("word", "the kind of request"),
    "message": Field("word", "the kind of message"),
    "stage": Field("text", "what is being done, for people"),
    "library": Field("name", "of its logger, such as asyncio"),
    "line": Field("text", "one line that the worker or its engine printed"),
    "last_lines": Field("list of texts", "what the worker and its engine printed last, 40 lines at most"),
    "placement": Field("word", "serial, ping-pong or overlap"),
    "exactness": Field("word", "fast, grid or invariant"),
    "engine": Field("text", "the engine's name and version"),
    "model": Field("name", "the model"),
    "speculation": Field("word", 'how the engine guesses tokens, such as "chain"; empty where it does not'),
    "patches": Field("list of names", "abilities that patches to vLLM have given it; see [patches.md](patches.md)"),
    "changed": Field("list of keys", "of the configuration, that took effect"),
    "needs_restart": Field("list of keys", "of the configuration, that differ and take effect at the next start"),
    "tasks": Field("list of names", "what has not ended"),
    "kind": Field("word", "of a step: extract or call"),
    "call": Field("name", "of `[calls]` in the configuration; null of an extract step"),
    "of": Field("name", "the event whose lines were held back"),
    "learned": Field("bool", "whether later predictions were corrected by it"),
    # how much
    "count": Field("number", "how many"),
    "agents": Field("agents", "of the chain"),
    "finished": Field("agents", "that had finished already"),
    "chains": Field("chains", "how many"),
    "hops": Field("hops", "that run on the worker"),
    "tokens": Field("tokens", "that were written by then"),
    "grid": Field("tokens", "the cell at which prompts are cut; null without"),
    "prompt_tokens": Field("tokens", "of the whole prompt"),
    "cached_tokens": Field("tokens", "of the prompt that a prefix cache held"),
    "output_tokens": Field("tokens", "that the agent has written"),
    "draft_tokens": Field("tokens", "that were guessed; null where none were to be"),
    "accepted_tokens": Field("tokens", "that were guessed rightly: each saved a step; null likewise"),
    "taken_back_tokens": Field(
        "tokens", "of a prompt joined as text, that were computed and turned out otherwise; null of other prompts"
    ),
    "appends": Field("appends", "prefills of parts of the prompt before it was complete"),
    "resumed": Field("times", "that the agent went on elsewhere after a loss or a move"),
    "characters": Field("characters", "of the step's output"),
    "attempt": Field("number", "from 1"),
    "max_model_len": Field("tokens", "of prompt and output together"),
    "kv_tokens": Field("tokens", "that the KV cache holds"),
    "start": Field("number", "of the worker's starts, this one included"),
    "exit_code": Field("number", "of the process; negative: the signal that ended it"),
    "progress": Field("number", "of the supervision's rounds"),
    "ratio": Field("ratio", "actual time to predicted time"),
    "factor": Field("ratio", "by which the prediction was corrected from experience"),
    "load": Field("chains", "that ran beside it at its start"),
    "late": Field("tokens", "that took more than 1.5 times the usual"),
    "late_share": Field("ratio", "`late` to all, 0 to 1"),
    "slowdown": Field("ratio", "time a token to the usual"),
    "appends_tokens": Field("tokens", "that came while appends were computed beside; not in `tokens`"),
    "prompts_tokens": Field("tokens", "that came while a prompt was computed whose answer was waited for"),
    "dropped": Field("chains", "whose spans nobody has, since the daemon's start"),
    # how long
    "seconds": Field("s", "how long"),
    "next_start_s": Field("s", "until the next try"),
    "e2e_ms": Field("ms", "from the chain's submission to its last token; null where it has none"),
    "ttft_ms": Field("ms", "first token, from the submission or the last token of all that the agent reads"),
    "total_ms": Field("ms", "last token, from the same moment"),
    "predicted_ms": Field("ms", "what was predicted, for the load that then came about"),
    "actual_ms": Field("ms", "what it took, without the queue"),
    "usual_ms": Field("ms", "the group's own median between two tokens; 0 where it is not known yet"),
    "p50_ms": Field("ms", "median between two tokens of an answer, while nothing but decodes ran"),
    "p99_ms": Field("ms", "the 99th percentile of the same"),
    "worst_ms": Field("ms", "the longest of the same"),
    "appends_p50_ms": Field("ms", "median of `appends_tokens`"),
    "appends_p99_ms": Field("ms", "99th percentile of `appends_tokens`"),
    "prompts_p99_ms": Field("ms", "99th percentile of `prompts_tokens`"),
    "lost_ms": Field("ms", "what tokens took beyond the usual, all answers together"),
    "offset_ms": Field("ms", "the worker's clock minus the daemon's"),
    "error_ms": Field("ms", "how far off the offset may be"),
    "left_ms": Field("ms", "what the hop was predicted to take where it was"),
    "there_ms": Field("ms", "what it was predicted to take elsewhere, its prompt prefilled anew"),
}
