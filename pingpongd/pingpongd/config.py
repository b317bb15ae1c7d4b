"""The daemon's configuration: one TOML file and a few flags into frozen structs.

A wrong key or value is a ConfigError that names it. `examples/cpu.toml` is a commented example.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from pingpong_bus.chain import Exactness
from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import ChunkSettings, SessionKind
from pingpong_worker.config import SimulatedSettings
from pingpong_worker.simulated_engine import check_settings
from pingpongd.calls import check_call_configs

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_DEFAULT_SLOT_TOKENS = 32768
_LEAST_SLOT_TOKENS = 8192
"""What a step may write that says nothing (`Agent.max_chars`)."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model beside the default one, by the name that groups and chains call it."""

    model: str
    """A Hugging Face name, a folder, or the embedded small model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """None: the daemon's."""
    vllm: dict[str, Any] = {}
    """Raw vLLM arguments of its engines, over the common ones and under a group's own."""


class CallConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a chain's `call` steps may run or ask, by the name that chains use; one of `command` and `url` is given."""

    command: list[str] | None = None
    """A program and its arguments; no shell. The step's input is its standard input, its standard output the answer."""
    url: str | None = None
    """Given the input by POST, as text in UTF-8; the answer's body is the output."""
    headers: dict[str, str] = {}
    """Of the request; "$NAME" stands for the daemon's environment variable NAME, "$$" for a dollar sign."""
    environment: dict[str, str] = {}
    """Of the command, whose environment has nothing else but PATH, HOME, LANG and PINGPONG_STEP; "$NAME" as above."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 30.0
    attempts: Annotated[int, msgspec.Meta(ge=1, le=10)] = 1
    """How often it is tried before the chain fails; more than 1 only where trying twice does no harm."""
    at_once: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    """How many may run at the same time."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Guessing tokens from an agent's prompt and from earlier runs of its chain."""

    enabled: bool = False
    """Start engines that can, and let chains that do not say use it."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    """The most tokens that are guessed for a step."""
    runs: Annotated[int, msgspec.Meta(ge=0, le=64)] = 4
    """Earlier outputs that are remembered of each agent of each chain; 0: only the prompt is guessed from."""
    memory_mib: _Positive = 64
    """Of all that is remembered; past it the chains that were not run for longest go."""


class PrefixConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeping static beginnings of prompts that are expected to come back."""

    keep: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.5
    """The part of each engine's KV cache that they may take from what would be evicted later; 0: none."""
    host_gib: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Host memory per engine for blocks that the device's cache has no room for, by vLLM's own offloading; 0: none."""


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device group: the devices that host one engine."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
    devices: Annotated[list[str], msgspec.Meta(min_length=1)]
    """"cpu:N" (a core), "cuda:N", or a GPU's UUID."""
    cores: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    """Cores for the worker's own process; empty: wherever the kernel likes."""
    vllm: dict[str, Any] = {}
    """Raw vLLM arguments of this group, over the common ones."""
    environment: dict[str, str] = {}
    simulated: SimulatedSettings | None = None
    """This group's timing model, in place of the common one."""
    model: str | None = None
    """A name of `[models]`; None: the default model."""


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a worker counts as hung."""

    heartbeat_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Between a worker's heartbeats."""
    misses: _Positive = 3
    """Heartbeats that may be missing in a row."""
    stall_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Work may wait this long for an engine step, or 5 times the predicted step, whichever is longer."""
    stop_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """From SIGTERM to SIGKILL."""


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker is replaced that died or hung."""

    backoff_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Before the first new start; doubled each time."""
    backoff_max_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    give_up_after: _Positive = 5
    """Ends within `within_s` after which the group is given up: a crash loop."""
    within_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0


class DecodeFirstConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much appends may slow a running decode in the same engine: a step, as a multiple of one without appends."""

    enabled: bool = True
    """False: vLLM's own scheduler; exactness "grid" is refused then, and placement "overlap" unless vLLM's
    `long_prefill_token_threshold` is set."""
    final: Annotated[float, msgspec.Meta(ge=1)] = 1.2
    """While an agent decodes that no other reads: its tokens are what a user sees coming."""
    inner: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    """While only agents decode that others read: what counts is when the chain ends. Not below `final`."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long ended chains are kept. A live chain is never dropped."""

    keep_days: Annotated[float, msgspec.Meta(ge=0)] = 7.0
    """After its end, once its result has been fetched."""
    keep_unfetched_days: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """After its end, where nobody has fetched its result."""
    keep_mib: _Positive = 1024
    """Of all ended chains; past it the oldest go, first those that were fetched."""


class JitterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Watching how steadily groups decode, and acting on it."""

    enabled: bool = True
    """False: nothing is judged, probed or routed around."""
    route: bool = True
    """Give a degraded group no new hops while another can take them."""
    move: bool = True
    """Move hops off a degraded group where that is predicted to be faster."""
    quiet_s: Annotated[float, msgspec.Meta(ge=1, le=25)] = 10.0
    """A degraded group is taken for healthy after so long without late tokens."""
    log_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 10.0
    """Between two log events `decode_steps` of a group that decodes."""
    probe_s: Annotated[float, msgspec.Meta(ge=0.5, le=3600)] = 1.0
    """Between two looks at processes and devices."""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metrics and health over HTTP: ``/metrics``, ``/healthz``, ``/readyz``."""

    listen: Annotated[str, msgspec.Meta(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):\d{1,5}$")] | None = None
    """ "HOST:PORT", such as "127.0.0.1:9464"; None: nothing is served. It asks nobody who they are."""


class TracesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry spans of chains and agents."""

    endpoint: str | None = None
    """An OTLP/HTTP endpoint, such as "http://127.0.0.1:4318"; None: what OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
    OTEL_EXPORTER_OTLP_ENDPOINT say, else none are sent."""


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration."""

    groups: Annotated[list[GroupConfig], msgspec.Meta(min_length=1)]
    instance: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$")] = "default"
    engine: Literal["vllm", "simulated"] = "vllm"
    model: str = "smollm2-135m"
    """The default model: a Hugging Face name, a folder, or the embedded small model."""
    models: dict[str, ModelConfig] = {}
    """Others that groups serve, by name."""
    calls: dict[str, CallConfig] = {}
    """What `call` steps of chains may use, by name."""
    speculation: SpeculationConfig = SpeculationConfig()
    prefixes: PrefixConfig = PrefixConfig()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    session: SessionKind = "prefix-cache"
    exactness: Exactness = "fast"
    """Of chains that ask for none."""
    grid_tokens: _Positive | None = None
    """The cell of exactness "grid", in tokens; None: what was measured to be best on the groups' devices."""
    batch_invariant: bool = False
    """Start every engine with vLLM's batch-invariant kernels, which exactness "invariant" takes; they are slow."""
    calibrate: bool = True
    """Measure each engine at its first start, for `auto` to predict from; False: `auto` goes by a rule of thumb."""
    slots: _Positive = 256
    """Token logs in the slab: the agents of all running chains together."""
    slot_tokens: _Positive | None = None
    """Capacity of a log, and so the most tokens one agent may write, or characters a step; default: the largest
    max_model_len, else 32768, and 8192 at least."""
    max_queued: _Positive = 10_000
    """Chains that may wait for slots; more are refused."""
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long SIGTERM waits for running chains; what is not through by then goes on at the next start."""
    start_seconds: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    """How long an engine may take to start."""
    runtime_dir: str | None = None
    """Where the sockets are; default: the instance's folder in $XDG_RUNTIME_DIR or /run."""
    state_dir: str | None = None
    """Where accepted chains are kept; default: $STATE_DIRECTORY, else the instance's folder in $XDG_STATE_HOME or
    ~/.local/state."""
    client_group: str | None = None
    """A Unix group whose members may use the control socket; None: this user (and root) alone."""
    log_dir: str | None = None
    """Where the last words of workers that died are written, a file each; None: $LOGS_DIRECTORY, else nowhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_worker_output: bool = False
    """Log every line that workers and engines print, not only those of a worker that failed."""
    chunks: ChunkSettings = ChunkSettings()
    vllm: dict[str, Any] = {}
    """Raw arguments of vLLM's AsyncEngineArgs, for every group."""
    environment: dict[str, str] = {}
    """Environment of every worker."""
    simulated: SimulatedSettings = SimulatedSettings()
    watch: WatchConfig = WatchConfig()
    restart: RestartConfig = RestartConfig()
    store: StoreConfig = StoreConfig()
    decode_first: DecodeFirstConfig = DecodeFirstConfig()
    jitter: JitterConfig = JitterConfig()
    http: HttpConfig = HttpConfig()
    traces: TracesConfig = TracesConfig()
    log_prompts: bool = False
    """Let log lines quote prompts, inputs and outputs, which are blotted out otherwise."""

    @property
    def log_capacity(self) -> int:
        """Tokens a log can hold."""
        if self.slot_tokens is not None:
            return self.slot_tokens
        if self.engine == "simulated":
            return max(self.simulated.max_model_len, _LEAST_SLOT_TOKENS)
        arguments = [self.vllm | model.vllm for model in (ModelConfig(model=self.model), *self.models.values())]
        lengths = [found.get("max_model_len") for found in arguments]
        known = [length if isinstance(length, int) and length > 0 else _DEFAULT_SLOT_TOKENS for length in lengths]
        return max(*known, _LEAST_SLOT_TOKENS)


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> DaemonConfig:
    """Read and check a configuration file.

    Args:
        path: a TOML file.
        overrides: top-level keys that flags set, over the file's.

    Raises:
        ConfigError: naming the file and the key that is off.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {path}.", hint="Name one with --config; examples/cpu.toml is one."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint="Check the file's permissions.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8.", hint="Save the file as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}.", hint="See examples/cpu.toml for the form.") from None
    return parse_config(document | (overrides or {}), source=str(path))


def _with_name(document: dict[str, Any], field: str, fault: str) -> str:
    """The path of a faulty field, with the name in a table of tables that msgspec leaves out: `calls[...].url`."""
    table, mark, rest = field.partition("[...]")
    named = document.get(table) if mark else None
    for name, value in named.items() if isinstance(named, dict) else ():
        try:
            msgspec.convert({**document, table: {name: value}}, type=DaemonConfig)
        except msgspec.ValidationError as error:
            if str(error) == fault:  # and not what is wrong further down
                return f"{table}.{name}{rest}"
    return field


def parse_config(document: dict[str, Any], *, source: str = "configuration") -> DaemonConfig:
    """Turn a decoded document into the struct; see `load_config`."""
    try:
        config = msgspec.convert(document, type=DaemonConfig)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$")
        field = _with_name(document, at.strip("`."), str(error))
        if "unknown field" in problem or "missing required field" in problem:
            key = problem.split("`")[1]
            field = f"{field}.{key}" if field else key
            problem = "there is no such key" if "unknown" in problem else "the key is missing"
        if field == "http.listen" and "regex" in problem:
            problem = 'expected HOST:PORT, such as "127.0.0.1:9464" or "[::1]:9464"'
        raise ConfigError(
            f"{problem[:1].lower()}{problem[1:]} (in {source}).",
            field=field,
            hint="The keys are explained in examples/cpu.toml.",
        ) from None
    _check_simulated(config)
    check_exactness(config)
    config = _named_models(config)
    check_call_configs(config.calls)
    names = [group.name for group in config.groups]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(
                f'two groups are called "{name}".', field=f"groups[{index}].name", hint="Give each a name of its own."
            )
    if config.engine == "vllm":
        owner: dict[str, str] = {}
        for index, group in enumerate(config.groups):
            for device in group.devices:
                if device in owner:
                    raise ConfigError(
                        f'the device {device} is in group "{owner[device]}" already.',
                        field=f"groups[{index}].devices",
                        hint="An engine wants its devices for itself.",
                    )
                owner[device] = group.name
    return config


def check_exactness(config: DaemonConfig) -> None:
    """Refuse what contradicts itself, such as a default level that no chain could have.

    Raises:
        ConfigError: naming the field.
    """
    paces = config.decode_first
    if paces.inner < paces.final:
        raise ConfigError(
            f"agents that others read ({paces.inner:g}) would be kept to a stricter pace than final ones "
            f"({paces.final:g}).",
            field="decode_first.inner",
            hint="Raise it to `final` or above, or lower `final`.",
        )
    why, hint = "", ""
    if config.exactness == "invariant" and not config.batch_invariant:
        why, hint = "it takes batch-invariant kernels", "Set `batch_invariant = true`."
    if config.exactness == "grid" and not paces.enabled:
        why, hint = "it takes the decode-first scheduler", "Set `decode_first.enabled = true`."
    if config.exactness == "grid" and config.session != "prefix-cache":
        why, hint = "a streaming-input session cuts its prompt where chunks end", 'Set session = "prefix-cache".'
    if why:
        raise ConfigError(f'"{config.exactness}" cannot be the default: {why}.', field="exactness", hint=hint)


def _named_models(config: DaemonConfig) -> DaemonConfig:
    """The configuration with no model named by groups that serve the default one.

    Raises:
        ConfigError: a group's model is unknown, or a name means two models.
    """
    if config.model in config.models or "" in config.models:
        name = config.model if config.model in config.models else ""
        raise ConfigError(
            f'"{name}" is the default model\'s name already.', field="models", hint="Give the other one another name."
        )
    groups = []
    for index, group in enumerate(config.groups):
        if group.model is not None and group.model not in (config.model, *config.models):
            there = ", ".join([config.model, *config.models])
            raise ConfigError(
                f'there is no model "{group.model}".', field=f"groups[{index}].model", hint=f"There are: {there}."
            )
        own = None if group.model == config.model else group.model
        groups.append(msgspec.structs.replace(group, model=own))
    return msgspec.structs.replace(config, groups=groups)


def _check_simulated(config: DaemonConfig) -> None:
    of_groups = {f"groups[{index}].": group.simulated for index, group in enumerate(config.groups)}
    for where, settings in ({"": config.simulated} | of_groups).items():
        if settings is not None:
            try:
                check_settings(settings)
            except ConfigError as error:
                raise ConfigError(error.message, field=f"{where}{error.field}", hint=error.hint) from None
