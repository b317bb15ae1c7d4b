"""Every message on every socket, as tagged msgspec structs.

Three conversations::

    client      DEALER  <->  ROUTER  supervisor     control.sock     ClientRequest, DaemonMessage
    worker      DEALER  <->  ROUTER  supervisor     workers.sock     SupervisorMessage, WorkerMessage
    worker      PUB      ->  SUB     workers        bus-NAME.sock    TokenChunk (topic: slot and generation)

A connection opens with a message that carries `version`; all later messages are of that version. Times are
CLOCK_MONOTONIC in ns, which every process of one host shares.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pingpong_bus.chain import Agent, Chain, Exactness, RenderedMessage, TokenId

PROTOCOL_VERSION = 6
"""Raised by every change that an older peer could misread."""

Placement = Literal["serial", "ping-pong", "overlap"]
Mode = Literal["auto", "serial", "ping-pong", "overlap"]
SessionKind = Literal["prefix-cache", "streaming-input"]
ChainState = Literal["queued", "running", "finished", "failed", "cancelled"]
FinishReason = Literal["stop", "length"]
WorkerState = Literal["starting", "loading", "ready", "draining", "stopping", "dead", "waiting", "failed"]
"""Of a group: "waiting" until its next worker starts, "failed" where no other will be tried."""
StepKind = Literal["decode", "appends", "prompts"]
"""What else was in flight in the engine while an answer waited for its next token: nothing that prefills, only appends,
or a prompt whose answer is waited for."""
JitterCause = Literal[
    "thermal_throttle",
    "power_throttle",
    "foreign_process",
    "cpu_starvation",
    "memory_pressure",
    "garbage_collection",
    "own_appends",
    "engine_stall",
    "device_fault",
    "unknown",
]
"""Why tokens came late, the most telling evidence first. Stable names: they stand in logs, metrics and alerts."""
HealthState = Literal["healthy", "degraded", "recovering"]
"""Of a group: "degraded" while its tokens come late, "recovering" from then on until it has been quiet for a while."""


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base: the class name is the tag on the wire."""


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of plain values inside messages."""


# --------------------------------------------------------------------------------------------------------- token bus


class StreamRef(_Value, frozen=True):
    """Names one token log for good: a slot, and which of its successive tenants."""

    slot: int
    generation: int
    bell: str = ""
    """Endpoint of the publisher that rings for this log; empty for a log that is complete."""


class TokenChunk(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The doorbell after an append: these ids now stand at `first_index` of the log."""

    version: int
    slot: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    generation: Annotated[int, msgspec.Meta(ge=1, lt=2**24)]
    first_index: Annotated[int, msgspec.Meta(ge=0)]
    ids: list[TokenId]
    state: Annotated[int, msgspec.Meta(ge=0, le=3)]
    """The log's state after the append, a `LogState`."""
    at_ns: int = 0
    """When the ids were committed: how late a reader hears of them is the bus's lag."""


# -------------------------------------------------------------------------------------------------- prompts and hops


class Literals(_Value, tag="ids", frozen=True):
    """Prompt tokens known before anything runs."""

    ids: list[int]


class OutputOf(_Value, tag="output", frozen=True):
    """The whole output of an earlier agent, by its index in the chain."""

    agent: int


class StreamSegment(_Value, tag="stream", frozen=True):
    """The whole output of an earlier agent, by its token log."""

    stream: StreamRef
    expected: int = 0
    """The most tokens the log will hold, the upstream's `max_tokens`; 0 where unknown."""


Segment = Literals | OutputOf
HopSegment = Literals | StreamSegment


class Sampling(_Value, frozen=True):
    """How an answer is sampled; `max_tokens` and the stops bound it."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class PreparedAgent(_Value, frozen=True):
    """An agent's prompt, tokenized once, before admission."""

    segments: list[Segment]
    joined: bool = False
    """True where the template cannot be cut at the references: the prompt is tokenized as one text at its start,
    so nothing of it can be read ahead; `segments` then only serves to bound the length."""
    note: str = ""
    """Why `joined` is true; for the user."""
    text: bool = False
    """Outputs are joined as text, tokenized while they stream in (`seam_prompt.py`); `segments` then only serves to
    bound the length. With `joined`, nothing of it is read ahead all the same."""
    counts: dict[int, int] = {}
    """With how many tokens an output counts in this prompt, by agent, where it is not the agent's `max_tokens`: an
    estimate, for how many a text takes is known once it is there."""
    thinking: bool = False
    """The prompt ends inside a <think> block that its template has opened: the output begins inside it."""


class TokenizerSource(_Value, frozen=True):
    """Where a model's tokenizer is loaded from."""

    model: str
    """A folder, or a name that transformers finds."""
    revision: str | None = None
    trust_remote_code: bool = False


class OutputSource(_Value, frozen=True):
    """How the ids of an upstream's log become the text that a joined prompt holds of it."""

    tokenizer: TokenizerSource | None = None
    """That wrote them; None: the reading worker's own."""
    characters: bool = False
    """The log is a step's: its "ids" are Unicode code points, and `tokenizer` means nothing."""
    strip: Literal["think"] | None = None
    """Blocks that are left out of the text."""
    inside: bool | None = None
    """With `strip`, whether the output begins inside a block (`PreparedAgent.thinking`); None: that is not known."""


class JoinedPrompt(_Value, frozen=True):
    """A prompt as text: tokenized once every upstream log is complete, or, with `ahead`, while they grow."""

    agent: Agent
    messages: list[RenderedMessage]
    outputs: dict[int, StreamRef]
    """Logs by agent index."""
    sources: dict[int, OutputSource] = {}
    """By agent index, where the text is not just the worker's own decoding of all ids."""
    expected: dict[int, int] = {}
    """The most that each log will hold, tokens or characters; 0 or absent where unknown."""
    ahead: bool = False


class ChunkSettings(_Value, frozen=True):
    """What the chunk policy may do; see `chunk_policy.py`."""

    append_tokens: Annotated[int, msgspec.Meta(ge=1)] = 32
    """An append waits for at least this many tokens (coalescing); the first takes what there is."""


class Resume(_Value, frozen=True):
    """Where an earlier hop of the same agent was cut off: what it had committed is kept and goes on from there."""

    tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Ids that stand in the output log already; they follow the prompt and are prefilled with it."""
    text_chars: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Characters of the output's text that the supervisor has; text is sent from there on."""


class DecodePace(_Value, frozen=True):
    """How long a step may take in which an answer decodes beside appends of others; the tighter of both counts."""

    itl_ratio: Annotated[float, msgspec.Meta(ge=1)] = 1.2
    """As a multiple of the step without appends."""
    itl_target_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None


class KeptPrefix(_Value, frozen=True):
    """A prompt's static beginning, which later prompts are expected to begin with too."""

    tokens: Annotated[int, msgspec.Meta(ge=1)]
    """How long it is."""
    reuse: Annotated[float, msgspec.Meta(ge=0)]
    """How many times an hour it is expected to come again: more of them stay in the cache longer."""


class HopSpec(_Value, frozen=True):
    """One run of an agent, or of what is left of it, on a worker."""

    hop: str
    """Unique for the daemon's life: chain/agent/number."""
    output: StreamRef
    """The log that the hop writes."""
    segments: list[HopSegment]
    sampling: Sampling
    joined: JoinedPrompt | None = None
    cache_salt: str | None = None
    session: SessionKind | None = None
    """None: the worker's default."""
    chunks: ChunkSettings = ChunkSettings()
    resume: Resume | None = None
    match: JoinedPrompt | None = None
    """What `prompt_token_match` is judged by; None for prompts given as ids."""
    pace: DecodePace = DecodePace()
    grid: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Prompts are cut at multiples of this many tokens from token 0; None: wherever the engine likes."""
    replay: bool = False
    """Bits are promised: with `resume`, the prompt alone is answered anew, step by step, and the beginning of that
    answer is checked against the committed tokens."""
    speculate: bool = False
    """Its tokens may be guessed, and checked several a step, where the engine can (`EngineLimits.speculation`)."""
    drafts: list[list[TokenId]] = []
    """What the same agent wrote in earlier runs of the chain, the latest first: to guess from."""
    keep: KeptPrefix | None = None
    """None: nothing of its prompt is worth more than any other's."""


class DraftCounts(_Value, frozen=True):
    """How guessing an answer's tokens went."""

    steps: int
    """Engine steps that gave tokens of the answer."""
    drafted: int
    """Tokens that were guessed."""
    accepted: int
    """Of them, those that were right: each saved a step."""


class SeamCounts(_Value, frozen=True):
    """How tokenizing a joined prompt ahead went."""

    rollbacks: int
    """Times that ids which the engine had were not a prefix of those of the whole text."""
    tokens: int
    """Ids taken back by them."""


class EngineLimits(_Value, frozen=True):
    """What an engine can take."""

    engine: str
    """Name and version, such as "vllm 0.32.0"."""
    model: str
    max_model_len: int
    """Tokens of prompt and output together."""
    vocabulary_size: int
    """Token ids are below it."""
    block_size: int
    """Tokens a prefix-cache block."""
    kv_tokens: int
    """Tokens that the KV cache holds."""
    max_num_seqs: int
    sessions: tuple[SessionKind, ...] = ("prefix-cache",)
    """Kinds of session it offers; the first is the default."""
    dtype: str = ""
    has_tokenizer: bool = True
    device: str = ""
    """What it runs on, such as "NVIDIA H200" or "2 x NVIDIA H200": engines on different kinds round differently."""
    grid_tokens: int = 0
    """The cell, in tokens, that the engine is best cut at (exactness "grid"); 0 where it cannot be held to a grid."""
    grid_refusal: str = ""
    """Why it cannot."""
    batch_invariant: bool = False
    """Whether its kernels round alike whatever they are batched with (exactness "invariant")."""
    decode_first: bool = False
    """Whether its scheduler is ours, which holds appends to a budget beside decodes."""
    overlap: bool = False
    """Whether agents may overlap on it (placement "overlap"): appends are held to a budget beside decodes, by our
    scheduler or by vLLM's own `long_prefill_token_threshold`."""
    tokenizer: str = ""
    """A digest of its tokenizer: outputs are spliced as ids between engines where it is equal."""
    speculation: str = ""
    """How it guesses tokens, such as "chain"; empty where it does not."""
    speculation_refusal: str = ""
    """Why it does not, though asked to."""
    abilities: tuple[str, ...] = ()
    """What patches to vLLM have given it (`patches/`), by name."""
    host_cache_bytes: int = 0
    """Host memory that prefix-cache blocks go to when the device's cache is full."""
    keep_tokens: int = 0
    """The most tokens of static beginnings that it keeps from eviction (`HopSpec.keep`); 0: it keeps none."""
    host_cache_tokens: int = 0
    """Of what is expected back, tokens that its host memory holds; 0: none, or it is not known how many."""


class BesideFigure(_Value, frozen=True):
    """One decode that went on beside appends of another session in the same engine."""

    context: int
    """Tokens that the appends' prompt held already."""
    tokens: int
    """Tokens that were appended."""
    append_ms: float
    """From handing them over until they were computed."""
    decode_ms: float
    """What a token of the decode took meanwhile; its own context was the smallest of `EngineFigures.decode`."""
    itl_ratio: float = 1.5
    """What the decode was kept to (`DecodePace.itl_ratio`). An engine without our scheduler knows no such thing."""


class EngineFigures(_Value, frozen=True):
    """What an engine was measured to take, by the clock of its worker: what placements are predicted from.

    Tables rise in their first column (and then their second). Of an engine that has not been measured there are none.
    """

    measured_at: str
    """ISO 8601, UTC."""
    prefill: list[tuple[int, float]]
    """Tokens of a prompt of which nothing was cached; ms from submission to its first token."""
    finalize: list[tuple[int, int, float]]
    """Tokens that were cached, tokens that were not; ms from submission to the first token."""
    decode: list[tuple[int, float]]
    """Tokens of context; ms a token, of one answer alone."""
    batch: list[tuple[int, float]]
    """Answers decoded at once, at the smallest context of `decode`; ms a token of each."""
    beside: list[BesideFigure] = []
    """Empty where the engine does not hold appends to a budget."""
    step_p50_ms: float = 0.0
    step_p99_ms: float = 0.0
    """Of the steps of answers that decoded alone: its jitter."""
    cached: bool = False
    """They come from a file of an earlier start on the same devices, model and versions."""


class SchedulerState(_Value, frozen=True):
    """What the decode-first scheduler of an engine did in its latest step with decodes, and since its start."""

    steps: int
    """Steps with at least one decode."""
    step_ms: float
    """The latest one took."""
    decode_ms: float
    """What it is priced at without appends."""
    target_ms: float
    """The tightest of the targets of what decoded."""
    budget_tokens: int
    """Append tokens that the step was granted."""
    reason: str
    """Why so many: see `decode_first.py`."""
    append_tokens: int
    """Append tokens computed beside decodes."""
    withheld_steps: int
    """Steps in which appends waited and were granted nothing."""
    kv_usage: float = 0.0
    """Part of the KV cache that requests hold, 0 to 1."""
    kv_kept: float = 0.0
    """Part of the KV cache that is kept for beginnings which are expected to come again, whether requests use them now
    or not."""
    gc_ms: float = 0.0
    """What collections of garbage have taken in the engine's process since its start."""


# ----------------------------------------------------------------------------------------------- supervisor to worker


class Welcome(_Tagged, frozen=True):
    """Answers `Hello`: go and start the engine."""

    version: int = PROTOCOL_VERSION
    at_ns: int = 0
    """When it was sent."""


class Prepare(_Tagged, frozen=True):
    """Render and tokenize all prompts of a chain."""

    request: int
    chain: Chain
    inputs: dict[str, str]
    agents: list[int] | None = None
    """Those to prepare, in order: the ones that this worker's model runs; None: all."""
    as_text: list[int] = []
    """Of them, those whose upstream outputs are joined as text."""


class StartHop(_Tagged, frozen=True):
    spec: HopSpec


class AbortHop(_Tagged, frozen=True):
    """End a hop for good; answered by `HopEnded` with state "aborted", also when it is unknown or over."""

    hop: str


class ResetPrefixCache(_Tagged, frozen=True):
    request: int


class ScoreNext(_Tagged, frozen=True):
    """How likely `tokens` are to follow `ids`; answered by `NextScored` or `RequestFailed`."""

    request: int
    ids: list[TokenId]
    tokens: list[TokenId]
    grid: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """As in `HopSpec`."""


class Calibrate(_Tagged, frozen=True):
    """Measure the engine anew, while no hop runs on it; answered by `Calibrated` or `RequestFailed`.

    It is given up as soon as a `StartHop` comes: users go first. The prefix cache is emptied by it.
    """

    request: int


class ReleaseHop(_Tagged, frozen=True):
    """Leave a hop to another worker: it ends where it stands, its log stays open; answered by `HopEnded` with state
    "released", or with how it has ended meanwhile; "aborted" where it is unknown."""

    hop: str


class Stop(_Tagged, frozen=True):
    """Leave what runs to others ("lost"), shut the engine down and exit 0."""


SupervisorMessage = (
    Welcome | Prepare | StartHop | AbortHop | ReleaseHop | ResetPrefixCache | ScoreNext | Calibrate | Stop
)


# ----------------------------------------------------------------------------------------------- worker to supervisor


class Hello(_Tagged, frozen=True):
    """First words of a worker."""

    version: int
    worker: str
    pid: int
    bell: str
    """Where its doorbells ring."""
    at_ns: int = 0
    """When it was sent."""


class Progress(_Value, frozen=True):
    """How far something long has come, for people to look at."""

    stage: str
    """What is being done, such as "loading the weights"."""
    done: float = 0.0
    total: float = 0.0
    """0: it is not known how much there is."""
    unit: str = ""
    """Of both: "bytes", "steps", "shards"; empty: no unit."""


class Crossing(_Value, frozen=True):
    """When a message was sent by its sender's clock, and when it came by its receiver's: shows whether they are one."""

    sent_ns: int
    received_ns: int


class Loading(_Tagged, frozen=True):
    """A stage of the engine's start, for people to read."""

    stage: str
    progress: Progress | None = None
    welcome: Crossing | None = None
    """In the first: how the `Welcome` came."""


class Ready(_Tagged, frozen=True):
    limits: EngineLimits
    figures: EngineFigures | None = None
    """None where the worker was told not to measure."""


class Calibrated(_Tagged, frozen=True):
    """The engine was measured anew."""

    request: int
    figures: EngineFigures


class WorkerFailed(_Tagged, frozen=True):
    """The worker ends, and why; `permanent` where another start cannot work either."""

    code: str
    message: str
    hint: str = ""
    permanent: bool = False


class Prepared(_Tagged, frozen=True):
    request: int
    agents: list[PreparedAgent]
    """In the order of `Prepare.agents`."""


class RequestFailed(_Tagged, frozen=True):
    """A `Prepare` or `ResetPrefixCache` could not be carried out."""

    request: int
    code: str
    message: str
    hint: str = ""
    field: str = ""


class HopOpened(_Tagged, frozen=True):
    """The feed has begun to read."""

    hop: str
    at_ns: int


class AppendRecord(_Value, frozen=True):
    """One append-prefill."""

    at_ns: int
    """When it was handed to the engine."""
    done_ns: int
    """When the engine had computed it; 0 where finalize overtook it."""
    tokens: int
    """Tokens in this append."""
    sent: int
    """Prompt tokens sent so far, this append included."""


class HopAppended(_Tagged, frozen=True):
    hop: str
    append: AppendRecord


class HopFinalized(_Tagged, frozen=True):
    """The prompt is complete and handed to the engine."""

    hop: str
    at_ns: int
    prompt_tokens: int
    prompt_digest: str
    """SHA-256 over the prompt ids as little-endian uint32: what the engine was really given."""
    final_tokens: int
    """Prompt tokens that no append had sent before."""


class HopFirstToken(_Tagged, frozen=True):
    hop: str
    at_ns: int
    cached_tokens: int


class HopText(_Tagged, frozen=True):
    """Ids up to `upto` stand in the log, and text for them as far as it is certain; sent at most every 200 ms."""

    hop: str
    upto: int
    """How many ids stand in the log."""
    text: str
    """What follows all text before; the last ids may have none yet, and without a tokenizer none has."""


class HopEnded(_Tagged, frozen=True):
    """The hop is over; it touches neither its own log nor its upstreams' any more.

    "lost": the engine died under it, or its worker stops; "released": `ReleaseHop` asked for it. Its log is left open,
    and another hop can go on from the tokens that stand in it (`Resume`). After "failed" and "aborted" the log is
    marked as aborted.
    """

    hop: str
    state: Literal["finished", "failed", "aborted", "lost", "released"]
    at_ns: int
    """When the last token was committed."""
    output_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    session: SessionKind = "prefix-cache"
    code: str = ""
    """Of a failure: the error's code and sentence."""
    message: str = ""
    drafts: DraftCounts | None = None
    """None where nothing was to be guessed."""
    seam: SeamCounts | None = None
    """None where no text was tokenized ahead."""


class HopChecked(_Tagged, frozen=True):
    """Follows `HopEnded` of a finished hop whose spec has `match`."""

    hop: str
    prompt_token_match: bool | None
    """Whether tokenizing the joined text as a whole gives the same prompt ids; None where there is no text."""


class PrefixCacheReset(_Tagged, frozen=True):
    request: int


class NextScored(_Tagged, frozen=True):
    request: int
    logprobs: list[float | None]
    """Natural logarithm of each asked token's probability, in order; None where it is too unlikely for the engine to
    say."""


class StepCounts(_Value, frozen=True):
    """How long answers waited for their next tokens, by what the engine had to do meanwhile; `step_times.py` has the
    buckets. Steps of one cell are alike, so that what is late can be told from what is more work."""

    kind: StepKind
    decodes: Annotated[int, msgspec.Meta(ge=1)]
    """Answers that were being decoded at once: 1, 2, 3 (to 4), 5 (to 8), 9 (to 16), 17 (to 32) and so on."""
    context: Annotated[int, msgspec.Meta(ge=0)]
    """Tokens of context of them all: 0 (to 1,023), 1,024, 2,048, 4,096 and so on."""
    buckets: dict[int, int]
    """Tokens by bucket."""
    worst_ms: float
    total_ms: float
    """The sum of all waits."""


class BusState(_Value, frozen=True):
    """How a worker hears of others' tokens, since its start."""

    chunks: int = 0
    """Doorbells heard."""
    repairs: int = 0
    """Times that tokens were found by looking, for their doorbell was lost or late."""
    lag_ms: float = 0.0
    """The sum over `chunks` of the time from the commit to the doorbell."""


class Heartbeat(_Tagged, frozen=True):
    """Sent every second (`WorkerConfig.heartbeat_s`) by a worker that serves."""

    at_ns: int
    open_hops: int
    output_tokens: int
    """Tokens written since the worker started."""
    rss_bytes: int
    steps: int = 0
    """Outputs that the engine has given since the worker started: tokens, and appends that it has computed."""
    waiting: int = 0
    """Submissions that the engine holds and has not answered in full: with some, steps have to come."""
    predicted_step_ms: float = 0.0
    """How long the next step should take at most, by what this engine has taken so far: a prefill that is under way
    counts with all its tokens. 0 where nothing waits."""
    scheduler: SchedulerState | None = None
    """None before the first step with a decode, and where the engine's scheduler is not ours."""
    step_counts: list[StepCounts] = []
    """Since the last beat."""
    pids: list[int] = []
    """The worker's process, then its engine's."""
    gc_ms: float = 0.0
    """What collections of garbage have taken in the worker's process since its start; the engine's are in
    `scheduler`."""
    loop_late_ms: float = 0.0
    """The latest that the worker's event loop was since the last beat."""
    bus: BusState = BusState()


WorkerMessage = (
    Hello
    | Loading
    | Ready
    | WorkerFailed
    | Prepared
    | RequestFailed
    | HopOpened
    | HopAppended
    | HopFinalized
    | HopFirstToken
    | HopText
    | HopEnded
    | HopChecked
    | PrefixCacheReset
    | NextScored
    | Calibrated
    | Heartbeat
)


# --------------------------------------------------------------------------------------------------- client to daemon


class SubmitOptions(_Value, frozen=True):
    """How a chain is run."""

    mode: Mode = "auto"
    isolate: bool = False
    """Give every hop a cache salt of its own, so that it finds nothing in any prefix cache."""
    session: SessionKind | None = None
    append_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    group: str | None = None
    """Run the chain in series on this device group."""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    """Waiting chains of a higher priority start first; waiting raises it, so that none starves."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] | None = None
    """The chain is wanted within this time of its submission: among equals the earlier deadline starts first, and one
    that has not finished by then fails."""
    exactness: Exactness | None = None
    """None: what the chain says, else the daemon's default."""
    traceparent: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    """W3C trace context that the chain's spans belong to."""
    speculate: bool | None = None
    """Of agents of chains that do not say; None: the daemon's `[speculation]`."""


class Submit(_Tagged, frozen=True):
    """Run a chain; answered by `Accepted`, and with `follow` by `ChainEvent`s."""

    request: int
    version: int
    chain: Chain
    inputs: dict[str, str] = {}
    options: SubmitOptions = SubmitOptions()
    follow: bool = False
    key: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Where set, submitting again with the same key, after a lost connection or a restart, names the same chain."""


class Attach(_Tagged, frozen=True):
    """Follow a chain; answered by `Snapshot`, then by `ChainEvent`s."""

    request: int
    version: int
    chain: str


class ListChains(_Tagged, frozen=True):
    """The latest chains; answered by `ChainList`, the latest last."""

    request: int
    version: int
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100


class GetStatus(_Tagged, frozen=True):
    request: int
    version: int


class GetResult(_Tagged, frozen=True):
    request: int
    version: int
    chain: str
    prompt_ids: bool = False


class Cancel(_Tagged, frozen=True):
    request: int
    version: int
    chain: str


class Forget(_Tagged, frozen=True):
    """Erase an ended chain with its prompts and outputs, at once; answered by `Done`."""

    request: int
    version: int
    chain: str


class ResetCaches(_Tagged, frozen=True):
    """Empty every group's prefix cache; refused while a chain runs."""

    request: int
    version: int


class Drain(_Tagged, frozen=True):
    """Finish what runs and take no more.

    Without a group the daemon then ends, like after SIGTERM; answered by `Done` at once. With one, that group takes
    no new hops, and its worker is replaced by a fresh one; answered by `Done` when that serves.
    """

    request: int
    version: int
    group: str | None = None
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """How long running hops, or chains, may take; None: the configuration's `drain_seconds`. What is not through by
    then is kept: hops go on elsewhere, chains at the daemon's next start."""


class Score(_Tagged, frozen=True):
    """How likely `tokens` are to follow `ids`, by the daemon's model; answered by `Scored`."""

    request: int
    version: int
    ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    tokens: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=8)]
    grid: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Cut the prompt as a chain of exactness "grid" was cut; see `ChainResult.grid`."""
    model: str = ""
    """That is asked, one of the daemon's `[models]`; empty: its default model."""


class Explain(_Tagged, frozen=True):
    """What each placement of a chain should take now, and what would make it faster; answered by `Explained`.

    The chain is checked and tokenized as by `Submit`, and neither kept nor run.
    """

    request: int
    version: int
    chain: Chain
    inputs: dict[str, str] = {}
    options: SubmitOptions = SubmitOptions()


class Seen(_Tagged, frozen=True):
    """How much a client has read; not answered.

    The daemon holds what a client has not read, up to a limit, and then sends it nothing more until this comes.
    """

    messages: Annotated[int, msgspec.Meta(ge=0)]
    """Messages received on this connection."""
    version: int = PROTOCOL_VERSION


ClientRequest = (
    Submit
    | Attach
    | ListChains
    | GetStatus
    | GetResult
    | Cancel
    | Forget
    | ResetCaches
    | Drain
    | Score
    | Explain
    | Seen
)


# --------------------------------------------------------------------------------------------------- daemon to client


class AppendEntry(_Value, frozen=True):
    """One append of an agent, as users see it."""

    at_ms: float
    """Since the chain was submitted."""
    tokens: int
    sent: int
    """Prompt tokens sent so far, this append included."""
    done_ms: float | None = None
    """When the engine had computed it; None where finalize overtook it."""


class ResumeEntry(_Value, frozen=True):
    """How an agent went on after it had lost its worker, or was taken off it because its tokens came late."""

    at_ms: float
    """Since the chain was submitted."""
    tokens: int
    """Tokens that it had written by then, and kept."""
    worker: str
    """Where it had run."""
    why: str


class HopEntry(_Value, frozen=True):
    """One hop of an agent, on one worker; times are ms since the chain was submitted, None where it has not come to
    that. An agent that was never lost or moved has one."""

    worker: str
    started_ms: float
    """When it was sent there."""
    opened_ms: float | None = None
    finalized_ms: float | None = None
    first_token_ms: float | None = None
    """Of this hop: the first that it wrote itself; where it was replayed, the first that came again."""
    ended_ms: float | None = None
    """Its last token, or when it was known to be lost."""
    state: Literal["running", "finished", "failed", "aborted", "lost", "moved"] = "running"
    tokens_before: int = 0
    """Output tokens that it found in the log."""
    tokens: int = 0
    """Output tokens that it wrote."""
    why: str = ""
    """Of one that was lost or moved."""
    prompt_tokens: int = 0
    """That it was given, without the output tokens that it found; 0 before `finalized_ms`."""
    final_tokens: int = 0
    """Of them, those that no append had sent before: they were handed over at `finalized_ms`."""
    cached_tokens: int = 0
    """Of them, those that the prefix cache held then; known with its first token."""


class OutputRead(_Value, frozen=True):
    """An earlier agent's output in a prompt."""

    agent: str
    at: int | None
    """Prompt tokens before it, as far as they are known; None where the prompt is tokenized as one text."""
    tokens: int
    """Of it, so far."""


class AgentResult(_Value, frozen=True):
    """One agent of a `ChainResult`."""

    name: str
    state: Literal["waiting", "reading", "writing", "finished", "failed", "cancelled"] = "waiting"
    text: str = ""
    output_ids: list[int] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    ttft_ms: float | None = None
    """First token minus the later of submission and the last upstream token."""
    total_ms: float | None = None
    """Last token minus the same."""
    worker: str = ""
    session: SessionKind | None = None
    appends: list[AppendEntry] = []
    opened_ms: float | None = None
    finalized_ms: float | None = None
    first_token_ms: float | None = None
    """Like `opened_ms`, `finalized_ms` and `last_token_ms`: since the chain was submitted."""
    last_token_ms: float | None = None
    prompt_token_match: bool | None = None
    prompt_digest: str = ""
    prompt_ids: list[int] | None = None
    """Only where asked for."""
    note: str = ""
    attempt: int = 1
    """Raised where its output begins anew, because the daemon was restarted before it had finished, or because it gave
    way to another agent: what it had sent before is void."""
    resumed: list[ResumeEntry] = []
    """Workers that it has outlived, or was moved off; its tokens were kept."""
    seed: int | None = None
    """Of the sampling; given by the daemon where the chain had none."""
    hops: list[HopEntry] = []
    """In order; of a chain from before the daemon's start the last one's alone."""
    reads: list[OutputRead] = []
    """What its prompt holds of earlier agents, in order."""
    kind: Literal["agent", "extract", "call"] = "agent"
    """An agent, or a step between agents: of one, `output_tokens` counts characters, and it has no ids."""
    model: str = ""
    """That ran it; empty of a step."""
    drafts: DraftCounts | None = None
    """How guessing its tokens went; None where none were."""
    seam: SeamCounts | None = None
    """How joining outputs as text ahead of their end went; None where they are spliced as ids."""


class Prediction(_Value, frozen=True):
    """What a placement of a chain should take, by the cost model (`pingpongd/cost_model.py`)."""

    placement: Placement
    groups: tuple[str, ...]
    """Per agent, the group that it would run on."""
    e2e_ms: float
    """Admission to last token, at the load and with the prefix caches of the moment; the sum of the other times."""
    prefill_ms: float
    """Of it, prefill that nothing hides: the agents' TTFT."""
    decode_ms: float
    """Of it, decoding, with what it is slowed down by appends and by others on the same groups."""
    wait_ms: float = 0.0
    """Of it, waiting for groups that others hold."""
    steps_ms: float = 0.0
    """Of it, steps between agents, which no engine runs."""
    hidden_ms: float = 0.0
    """Prefill that runs beside decodes, and so costs no time of its own."""
    factor: float = 1.0
    """By what these times were multiplied: what chains of this placement have taken lately, over what was predicted."""
    unknown_steps: tuple[int, ...] = ()
    """Agents that are steps of which the daemon has seen no run since its start: their time in this is a guess."""


class ChainResult(_Value, frozen=True):
    """What `submit --json` and `result --json` print."""

    id: str
    name: str
    state: ChainState
    placement: Placement | None = None
    e2e_ms: float | None = None
    """Submission to last token."""
    agents: list[AgentResult] = []
    error: str = ""
    why: str = ""
    """Why this placement was chosen; of a queued chain, what it waits for."""
    resumed: bool = False
    """An agent has outlived its worker, or the chain a restart of the daemon; the agents say how."""
    exactness: Exactness = "fast"
    """What it was run at."""
    grid: int | None = None
    """The cell in tokens, at exactness "grid"."""
    predictions: list[Prediction] = []
    """What `auto` chose from, the least first; of a chain that was told its placement, that one alone. Empty where the
    engines were not measured."""
    predicted_ms: float | None = None
    """Of the placement that was taken, to be compared with `e2e_ms`; it knows nothing of the time in the queue."""
    submitted_at: str = ""
    """ISO 8601, UTC: where the chain's times count from."""
    started_ms: float | None = None
    """When it left the queue, since its submission."""
    devices: dict[str, list[str]] = {}
    """Of the workers that its agents ran on: GPUs by UUID, cores as "cpu:0"."""


class ChainSummary(_Value, frozen=True):
    """One chain of a `ChainList`."""

    id: str
    name: str
    state: ChainState
    placement: Placement | None
    agents: int
    finished_agents: int
    age_s: float
    e2e_ms: float | None
    why: str = ""
    """What a chain waits for: queued, where that is not its turn alone; running, where an agent is held."""
    exactness: Exactness = "fast"
    output_tokens: int = 0
    """Of a live chain: written so far, by all its agents."""
    max_output_tokens: int = 0
    """Of a live chain: what its agents may write at most; those that have finished count with what they wrote."""
    agent: str = ""
    """Of a running chain: the agent that writes, else the one that reads."""
    worker: str = ""
    """Where that one runs."""


class GroupHealth(_Value, frozen=True):
    """Whether a group's tokens come in time."""

    state: HealthState = "healthy"
    cause: JitterCause | None = None
    """Of the episode that goes on, or has just ended."""
    why: str = ""
    """The evidence, in a sentence."""
    since_s: float = 0.0
    """How long it has been in this state."""
    slowdown: float = 1.0
    """What a token takes, over what it should: 1 where the group is healthy."""
    episodes: int = 0
    """Since the daemon's start."""


class ItlSummary(_Value, frozen=True):
    """Time between tokens (ITL) on a group over the latest seconds."""

    tokens: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    worst_ms: float = 0.0
    late: int = 0
    """Tokens that took more than 1.5 times the usual."""
    usual_ms: float = 0.0
    """The group's own median for such steps; 0 where it is not known yet."""
    history_ms: list[float] = []
    """The median of each of the latest seconds, the oldest first; 0 where nothing was decoded."""


class DeviceState(_Value, frozen=True):
    """What NVML says of a GPU, or of a MIG slice; None where it does not say."""

    uuid: str
    name: str = ""
    parent_uuid: str = ""
    """Of a MIG slice: its card, which clocks, power and temperature are of."""
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    throttle: list[str] = []
    """Reasons for reduced clocks that are in force, as in NVML's names: "sw_thermal_slowdown", "sw_power_cap" ..."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    utilization: float | None = None
    """Part of the time in which a kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    ecc_errors: int | None = None
    """Uncorrected, since the driver was loaded."""
    xid: int | None = None
    """The latest XID that was reported since the daemon's start."""
    xids: int = 0
    """How many were."""
    pcie_rx_mb_s: float | None = None
    pcie_tx_mb_s: float | None = None
    foreign_pids: list[int] = []
    """Processes on the device that are not the group's, as NVML numbers them: in a container, by the host."""
    foreign_utilization: float | None = None
    """The part of the time in which those computed, 0 to 1."""


class HostState(_Value, frozen=True):
    """What the kernel says of a worker's processes, per second over the latest interval; None where it does not."""

    cpu: float = 0.0
    """Cores' worth of CPU time, of all its processes."""
    runnable_wait: float | None = None
    """The part of the time in which the busiest of its threads was ready to run and had no core, 0 to 1."""
    involuntary_switches: float | None = None
    steal: float | None = None
    """The part of the time that the hypervisor took from this machine's cores."""
    major_faults: float | None = None
    swapped_bytes: int | None = None
    rss_bytes: int = 0
    pressure_cpu: float | None = None
    """PSI, "some": the part of the time in which tasks waited for a core, 0 to 1; the narrowest cgroup's, else the
    machine's."""
    pressure_memory: float | None = None
    pressure_io: float | None = None
    throttled: float | None = None
    """The part of the time in which the cgroup's CPU quota held it up."""


class WorkerStatus(_Value, frozen=True):
    """One worker of a `StatusReply`."""

    name: str
    devices: list[str]
    state: WorkerState
    stage: str
    pid: int | None
    hops: int
    limits: EngineLimits | None
    rss_bytes: int
    output_tokens: int
    restarts: int = 0
    """Times that it was replaced since the daemon's start."""
    failure: str = ""
    """Why the last one ended, where it was not asked to."""
    scheduler: SchedulerState | None = None
    figures: EngineFigures | None = None
    health: GroupHealth = GroupHealth()
    itl: ItlSummary = ItlSummary()
    host: HostState | None = None
    gpus: list[DeviceState] = []
    progress: Progress | None = None
    """Of a worker that loads."""
    kv_held_tokens: int = 0
    """Set aside for the full lengths of open hops."""

    model: str = ""
    """The model that it serves, one of the daemon's `[models]`; empty: the default one."""

    @property
    def serves(self) -> bool:
        """Whether its worker runs hops and tells of itself; of others, what was told last is not the case any more."""
        return self.state in ("ready", "draining")


class StoreStatus(_Value, frozen=True):
    """Where chains are kept."""

    path: str
    chains: int
    """In the store, live and ended."""
    bytes: int
    pending: int
    """Changes that are not on disk yet."""
    error: str = ""
    """Why the latest could not be written; it is tried again."""


class Accepted(_Tagged, frozen=True):
    request: int
    chain: str


class ErrorReply(_Tagged, frozen=True):
    """A refusal; `code` names a class of `errors.py`."""

    request: int
    code: str
    message: str
    hint: str = ""
    field: str = ""


class Snapshot(_Tagged, frozen=True):
    """Where a chain stands; later events go on from here."""

    request: int
    result: ChainResult


class ChainList(_Tagged, frozen=True):
    request: int
    chains: list[ChainSummary]


class StatusReply(_Tagged, frozen=True):
    """The daemon, its workers, the slots of its slab, and how many chains are in which state."""

    request: int
    instance: str
    version: str
    pid: int
    uptime_s: float
    state: Literal["starting", "ready", "degraded", "draining"]
    """"degraded": not every group serves."""
    slots_free: int
    slots_total: int
    slot_capacity: int
    workers: list[WorkerStatus]
    chains: dict[ChainState, int]
    store: StoreStatus | None = None
    refused_frames: dict[str, int] = {}
    """Frames that made no sense or came from strangers, by socket, since the start."""
    python: str = ""
    """Version of the Python that the daemon and its workers run on."""
    exactness: Exactness = "fast"
    """Of chains that ask for none."""
    progress: Progress | None = None
    """Of what the daemon itself does, such as fetching the model."""


class Scored(_Tagged, frozen=True):
    request: int
    logprobs: list[float | None]
    """As in `NextScored`."""


class Advice(_Value, frozen=True):
    """Something that would make a chain faster."""

    text: str
    """A sentence that says what to change, and why it helps."""
    saves_ms: float | None = None
    """What it should save, where the cost model can tell."""


class Explained(_Tagged, frozen=True):
    """What placements of a chain should take at the moment, which would be taken, and what would make it faster."""

    request: int
    predictions: list[Prediction]
    """Every placement that the configured groups allow, the least first."""
    chosen: Prediction | None
    """What the submission's mode takes now; None where the engines were not measured."""
    placement: Placement
    """The same by name: known without figures too."""
    why: str
    advice: list[Advice] = []


class ResultReply(_Tagged, frozen=True):
    request: int
    result: ChainResult


class Done(_Tagged, frozen=True):
    """A request without an answer of its own has been carried out."""

    request: int


EventKind = Literal[
    "started",
    "opened",
    "reading",
    "finalized",
    "writing",
    "tokens",
    "agent_finished",
    "agent_resumed",
    "agent_restarted",
    "ended",
]


class ChainEvent(_Tagged, frozen=True):
    """Something happened to a followed chain.

    `kind` says which fields of `data` there are:
    ``started``: placement, why. ``opened``: worker, prompt_tokens (the literal ones, a lower bound).
    ``reading``: sent (prompt tokens). ``finalized``: prompt_tokens. ``writing``: cached_tokens, ttft_ms.
    ``tokens``: ids, text, first_index and first_character (where they stand in the output), output_tokens.
    ``agent_finished``: finish_reason, output_tokens, total_ms; of a step output_tokens is 0, and there is characters.
    A step's ``tokens`` have text and no ids, and its ``opened`` no worker.
    ``agent_resumed``: worker, tokens, why, times (so far); it goes on, what it sent stays. ``agent_restarted``: why;
    what an earlier attempt sent is void. ``ended``: state, error; the last event of a chain.
    """

    chain: str
    kind: EventKind
    at_ms: float
    """Since the chain was submitted."""
    agent: str = ""
    attempt: int = 1
    """Of the agent; see `AgentResult.attempt`."""
    data: dict[str, Any] = {}


DaemonMessage = (
    Accepted | ErrorReply | Snapshot | ChainList | StatusReply | ResultReply | Scored | Explained | Done | ChainEvent
)
