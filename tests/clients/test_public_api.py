"""What `pingpong_client` promises to export, and nothing besides."""

import pingpong_client
from pingpong_client import __all__ as exported

PROMISED = {
    "DraftCounts", "Extract", "SeamCounts",
    "Advice", "BesideFigure", "EngineFigures", "Explained", "Prediction",
    "Agent", "AgentCertificate", "AgentResult", "AsyncClient", "Certificate", "Chain", "ChainError", "ChainEvent",
    "Change", "Comparison", "SchedulerState", "read_certificate", "write_certificate",
    "ChainFailed", "ChainNotFound", "ChainResult", "ChainSummary", "Client", "DaemonUnavailable", "DataError",
    "Difference", "EngineError", "EngineLost", "Message", "MessageError", "NotEqual", "Overloaded", "PingpongError",
    "ResumeEntry", "RunCertificate", "StatusReply", "StoreError", "StoreStatus", "SubmitOptions",
    "UsageError", "WorkerStatus", "load_chain", "verify",
}  # fmt: skip


def test_all_is_what_is_promised_sorted_and_there():
    assert set(exported) == PROMISED
    assert list(exported) == sorted(exported, key=lambda name: (name[0].islower(), name))
    assert all(hasattr(pingpong_client, name) for name in exported)


def test_everything_exported_has_a_docstring():
    undocumented = [name for name in exported if not getattr(pingpong_client, name).__doc__]
    assert undocumented == []


def test_the_clients_offer_the_same_methods():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(pingpong_client.Client) == public(pingpong_client.AsyncClient)
