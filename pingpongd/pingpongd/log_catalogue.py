"""Every event that the daemon logs: level, fields, and how often it may come. Pure.

`docs/logs.md` is made from it (`python benchmarks/logs_page.py`), and a test holds every call in the source against it.
Names are stable: an event or a field may be added, and none changes its meaning.
"""

from __future__ import annotations

from typing import Final

from pingpongd.log_event import Event, Level, Limit
from pingpongd.log_fields import FIELDS

_DEBUG: Final[tuple[Level, ...]] = ("debug",)
_INFO: Final[tuple[Level, ...]] = ("info",)
_WARNING: Final[tuple[Level, ...]] = ("warning",)
_ERROR: Final[tuple[Level, ...]] = ("error",)
_BY_WORKER: Final = Limit(20, 2.0, ("worker",))
_BY_CHAIN: Final = Limit(10, 1.0, ("chain",))
_SELDOM: Final = Limit(5, 0.1)
_STRANGERS: Final = Limit(1, 0.1, ("socket",))
"""Whoever can open a socket can cause these without end."""

GROUPS: Final[dict[str, dict[str, Event]]] = {
    "The daemon": {
        "daemon_started": Event(
            _INFO, "the sockets are there, and engines begin to load", ("instance", "pid", "socket")
        ),
        "daemon_ready": Event(
            _INFO, "every group serves, or will not", ("seconds",), {"seconds": "since the daemon's start"}
        ),
        "daemon_draining": Event(
            _INFO,
            "the daemon was asked to end and lets chains finish",
            ("chains", "seconds"),
            {"chains": "that are under way", "seconds": "that they may take"},
        ),
        "chains_kept": Event(_INFO, "chains that are not through wait for the next start", ("chains", "reason")),
        "daemon_stopped": Event(_INFO, "the last line of a daemon that ends in order", ("instance",)),
        "daemon_failed": Event(_ERROR, "the daemon ends: it cannot go on", ("code", "error")),
        "config_reloaded": Event(_INFO, "SIGHUP: the configuration was read again", ("changed", "needs_restart")),
        "config_not_reloaded": Event(_ERROR, "SIGHUP: the file is wrong; all stays as it is", ("error",)),
        "model_stage": Event(_INFO, "the model is fetched or converted", ("model", "stage"), limit=Limit(20, 0.5)),
        "service_manager_unreachable": Event(
            _WARNING,
            "systemd does not take what the daemon tells it",
            ("error", "message"),
            {"message": "the first line of what was to be told"},
            _SELDOM,
        ),
        "watchdog_not_fed": Event(
            _WARNING, "systemd is not told that the daemon lives", ("progress", "reason"), limit=_SELDOM
        ),
        "sweeper_died": Event(
            _WARNING, "the process that clears up behind a killed daemon ended", ("next_start_s",), limit=_SELDOM
        ),
        "sweeper_not_started": Event(_ERROR, "and it cannot be started again", ("error",), limit=_SELDOM),
        "log_dir_unusable": Event(
            _WARNING, "the folder for workers' last words cannot be had", ("path", "error", "effect")
        ),
        "last_words_not_kept": Event(
            _WARNING, "what a worker printed last is not kept", ("path", "error"), limit=_SELDOM
        ),
        "http_serving": Event(_INFO, "metrics and health are answered for", ("host", "port")),
        "traces_on": Event(_INFO, "spans of chains are sent", ("host",)),
        "traces_off": Event(_WARNING, "the environment names an endpoint for spans, and none are sent", ("reason",)),
        "http_fault": Event(_ERROR, "a fault of the daemon in an answer over HTTP", ("error",), limit=_SELDOM),
        "traces_dropped": Event(_WARNING, "nobody takes the spans of a chain", ("reason", "dropped"), limit=_SELDOM),
        "library_said": Event(
            ("warning", "error"),
            "a warning or an error of a library, by Python's own logging",
            ("library", "line"),
            {"line": "what it said"},
            Limit(20, 1.0, ("library",)),
        ),
        "lines_suppressed": Event(
            _INFO,
            "lines of a limited event were held back, and none of it has come since",
            ("of", "count"),
            limit=Limit(1000, 1000.0),
        ),
    },
    "Workers and engines": {
        "worker_started": Event(
            _INFO, "a worker's process runs", ("worker", "pid", "devices", "start"), limit=_BY_WORKER
        ),
        "worker_loading": Event(_INFO, "its engine loads: a stage begins", ("worker", "stage"), limit=_BY_WORKER),
        "worker_ready": Event(
            _INFO,
            "it serves",
            ("worker", "devices", "engine", "model", "max_model_len", "kv_tokens", "speculation", "patches"),
            limit=_BY_WORKER,
        ),
        "worker_clock_off": Event(
            _WARNING,
            "its clock is not the daemon's; its times are corrected",
            ("worker", "offset_ms", "error_ms"),
            limit=_BY_WORKER,
        ),
        "worker_failed": Event(_ERROR, "it gave up, and says why", ("worker", "error", "permanent"), limit=_BY_WORKER),
        "worker_hung": Event(_ERROR, "it is taken for hung, and ended", ("worker", "pid", "why"), limit=_BY_WORKER),
        "worker_ends": Event(_INFO, "it is about to be ended", ("worker", "how", "why"), limit=_BY_WORKER),
        "worker_stopped": Event(_INFO, "it has ended, as was wanted", ("worker", "exit_code"), limit=_BY_WORKER),
        "worker_died": Event(
            _ERROR,
            "it has ended, and was not to",
            ("worker", "why", "exit_code", "start", "last_lines"),
            limit=_BY_WORKER,
        ),
        "worker_waits": Event(
            _INFO,
            "the next start waits for a while",
            ("worker", "seconds", "why"),
            {"seconds": "until the next start"},
            _BY_WORKER,
        ),
        "group_failed": Event(
            _ERROR, "no other start is tried", ("worker", "why", "permanent", "hint"), limit=_BY_WORKER
        ),
        "group_begins_anew": Event(_INFO, "a failed group is tried again, as was asked", ("worker",), limit=_BY_WORKER),
        "worker_draining": Event(
            _INFO,
            "a group takes no new hops, and its worker will be replaced",
            ("worker", "hops", "seconds"),
            {"seconds": "that its hops may take"},
            _BY_WORKER,
        ),
        "worker_drain_deadline": Event(
            _INFO, "hops that are not through go on elsewhere", ("worker", "hops"), limit=_BY_WORKER
        ),
        "worker_not_ended": Event(_ERROR, "workers are still there at the daemon's end", ("tasks",)),
        "worker_output": Event(
            ("debug", "info", "warning", "error"),
            "a line that a worker printed: at debug, with `log_worker_output` at info; a worker's own warnings and "
            "errors always",
            ("worker", "line"),
            limit=Limit(1000, 50.0, ("worker",)),
        ),
        "nvml_unavailable": Event(_WARNING, "GPUs cannot be looked at; groups on them are judged without", ("why",)),
        "probe_failed": Event(
            _WARNING,
            "the kernel or the driver answers what is not understood; the group is judged without",
            ("worker", "error"),
            limit=Limit(5, 0.1, ("worker",)),
        ),
        "recalibration_began": Event(_INFO, "an idle engine is measured anew", ("worker",), limit=_BY_WORKER),
        "recalibration_done": Event(_INFO, "it was", ("worker",), limit=_BY_WORKER),
        "recalibration_given_up": Event(_INFO, "it was not: work came", ("worker", "reason"), limit=_BY_WORKER),
        "figures_drifted": Event(
            _WARNING,
            "an engine takes other times than it was measured to",
            ("group", "ratio"),
            limit=Limit(5, 0.1, ("group",)),
        ),
    },
    "Chains": {
        "chain_accepted": Event(
            _INFO, "a chain was checked and is on disk", ("chain", "name", "agents", "exactness", "grid")
        ),
        "chain_restored": Event(
            _INFO,
            "a chain of an earlier start goes on",
            ("chain", "agents", "finished"),
        ),
        "chain_waits": Event(_WARNING, "a chain of an earlier start cannot run as things are", ("chain", "reason")),
        "chain_started": Event(_INFO, "its turn has come", ("chain", "placement", "why", "exactness")),
        "chain_ended": Event(_INFO, "it is over", ("chain", "state", "e2e_ms", "error")),
        "prediction": Event(
            _INFO,
            "a chain has finished that a time was predicted for",
            (
                "chain",
                "placement",
                "groups",
                "predicted_ms",
                "actual_ms",
                "ratio",
                "factor",
                "load",
                "learned",
            ),
        ),
        "agent_finished": Event(
            _INFO,
            "an agent has written all",
            (
                "chain",
                "agent",
                "model",
                "worker",
                "ttft_ms",
                "total_ms",
                "prompt_tokens",
                "cached_tokens",
                "output_tokens",
                "appends",
                "resumed",
                "draft_tokens",
                "accepted_tokens",
                "taken_back_tokens",
            ),
        ),
        "agent_resumed": Event(
            _INFO,
            "an agent goes on from what an earlier hop had written",
            ("chain", "agent", "hop", "worker", "tokens"),
        ),
        "step_finished": Event(
            _INFO,
            "a step between agents has given its output",
            ("chain", "agent", "kind", "call", "total_ms", "characters"),
            {"total_ms": "from the end of what it reads to its own"},
        ),
        "step_failed": Event(
            _INFO,
            "a step has failed, or was ended with its chain",
            ("chain", "agent", "kind", "call", "state", "error"),
        ),
        "step_not_kept": Event(
            _WARNING,
            "what a call takes or has given is not on disk yet: the store takes nothing",
            ("chain", "agent", "error"),
        ),
        "step_fault": Event(_ERROR, "a fault of the daemon in a step; the chain fails", ("chain", "agent", "error")),
        "call_tried_again": Event(
            _WARNING,
            "a call has failed, and has attempts left",
            ("chain", "agent", "call", "attempt", "error"),
            {"attempt": "the one that failed"},
            Limit(20, 1.0, ("call",)),
        ),
        "call_repeated": Event(
            _WARNING,
            "a call is made again, for it may have been running when an earlier daemon ended",
            ("chain", "agent", "call"),
        ),
        "extract_process_ended": Event(
            _WARNING,
            "the process that runs extract steps hangs or has died; another takes its place",
            ("pid", "reason"),
            limit=_SELDOM,
        ),
        "hop_lost": Event(
            _WARNING,
            "a hop's worker is gone",
            ("chain", "agent", "hop", "worker", "phase", "tokens", "reason"),
            limit=Limit(100, 10.0),
        ),
        "hop_not_sent": Event(
            _WARNING,
            "a worker takes no hop; another will",
            ("chain", "agent", "hop", "worker", "error"),
            limit=Limit(100, 10.0),
        ),
        "abort_not_sent": Event(
            _WARNING,
            "a worker does not hear that a hop is to end",
            ("chain", "agent", "hop", "error"),
            limit=Limit(100, 10.0),
        ),
        "hop_unknown": Event(
            _DEBUG, "a message came late, of a hop that is over", ("worker", "hop", "message"), limit=Limit(100, 10.0)
        ),
        "illegal_transition": Event(
            _ERROR, "a fault in the daemon; the chain fails", ("chain", "error"), limit=_BY_CHAIN
        ),
        "result_not_kept": Event(_ERROR, "a result waits in memory: the store takes nothing", ("chain", "error")),
        "chain_forgotten": Event(_INFO, "a client had it erased", ("chain",)),
        "chains_expired": Event(_INFO, "ended chains were erased, for their time was over", ("count",)),
        "past_runs_taken_up": Event(
            _INFO,
            "what the store keeps of earlier runs is there to guess from",
            ("chains",),
            {"chains": "that were read"},
        ),
        "past_runs_unread": Event(_WARNING, "what the store keeps could not be read to guess from", ("error",)),
        "expiry_failed": Event(_WARNING, "they could not be", ("error",), limit=_SELDOM),
        "follower_dropped": Event(_INFO, "a client that does not read hears no more of a chain", ("chain",)),
        "store_created": Event(_INFO, "there was no chain store", ("path",)),
        "store_was_empty": Event(_WARNING, "its file had 0 bytes", ("path", "reason")),
        "store_removed": Event(
            _WARNING, "its file was removed or replaced meanwhile", ("path", "error"), limit=_SELDOM
        ),
    },
    "Sockets": {
        "frame_refused": Event(
            _WARNING, "a frame or a connection made no sense", ("socket", "why", "peer"), limit=_STRANGERS
        ),
        "request_refused": Event(
            _WARNING, "a client's request was refused", ("request", "code", "error"), limit=Limit(20, 2.0)
        ),
        "request_failed": Event(
            _ERROR, "a fault in the daemon; the client is told", ("request",), limit=Limit(20, 1.0)
        ),
    },
    "Jitter": {
        "decode_steps": Event(
            _INFO,
            "how steadily a group has decoded, every `jitter.log_s` in which it has",
            (
                "worker",
                "devices",
                "seconds",
                "tokens",
                "p50_ms",
                "p99_ms",
                "worst_ms",
                "late",
                "usual_ms",
                "appends_tokens",
                "appends_p50_ms",
                "appends_p99_ms",
                "prompts_tokens",
                "prompts_p99_ms",
            ),
            {"seconds": "that the line is about", "tokens": "while nothing but decodes ran"},
            Limit(5, 1.0, ("worker",)),
        ),
        "decode_jitter": Event(
            _WARNING,
            "an episode has begun: a group's tokens come late",
            (
                "episode",
                "worker",
                "devices",
                "cause",
                "why",
                "evidence",
                "p50_ms",
                "p99_ms",
                "worst_ms",
                "late_share",
                "usual_ms",
                "slowdown",
            ),
            limit=_BY_WORKER,
        ),
        "decode_jitter_cause": Event(
            _WARNING,
            "the evidence of an episode that goes on points elsewhere by now",
            ("episode", "worker", "cause", "was", "why", "evidence"),
            limit=_BY_WORKER,
        ),
        "decode_jitter_ended": Event(
            _INFO,
            "an episode is over: the group has been quiet for `jitter.quiet_s`, or its worker has ended",
            (
                "episode",
                "worker",
                "devices",
                "cause",
                "seconds",
                "tokens",
                "late",
                "lost_ms",
                "chains",
                "worst_ms",
            ),
            {
                "cause": "the one that most seconds pointed to",
                "seconds": "from the first late token to the last",
                "tokens": "in that time",
                "chains": "ids of those that decoded on it meanwhile; at most 100",
            },
            _BY_WORKER,
        ),
        "group_health": Event(
            _WARNING,
            "whether a group is routed around has changed",
            ("worker", "state", "was", "cause", "why"),
            {"state": "healthy, degraded or recovering"},
            _BY_WORKER,
        ),
        "hop_moved": Event(
            _INFO,
            "a hop was taken off a degraded group",
            ("chain", "agent", "hop", "worker", "to", "tokens", "left_ms", "there_ms", "cause"),
            {"worker": "that it left"},
        ),
        "agent_rerouted": Event(
            _INFO,
            "an agent runs elsewhere than planned, for its group's tokens come late",
            ("chain", "agent", "worker", "to", "placement", "reason"),
            {"worker": "that it was planned for", "placement": "of what is left of its chain"},
        ),
        "release_not_sent": Event(
            _WARNING,
            "a worker does not hear that a hop is to go elsewhere",
            ("chain", "agent", "hop", "worker", "error"),
            limit=Limit(100, 10.0),
        ),
    },
}
"""By what they are about, in the order of the documentation."""

EVENTS: Final[dict[str, Event]] = {name: event for some in GROUPS.values() for name, event in some.items()}
_OTHER: Final = Limit(20, 1.0)
"""Of an event that is not in the catalogue, which a test does not let happen."""


def limit_of(event: str) -> Limit:
    """How often an event may be written."""
    found = EVENTS.get(event)
    return found.limit if found is not None else _OTHER


def meaning(event: Event, field: str) -> tuple[str, str]:
    """Unit and meaning of a field of an event.

    Raises:
        KeyError: the field is not in the table of fields.
    """
    unit, text = FIELDS[field]
    return unit, event.means.get(field, text)
