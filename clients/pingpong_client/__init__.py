"""The Python client of pingpongd: run chains of agents, follow them, and prove that reading ahead changes nothing."""

from pingpong_bus.chain import Agent, Chain, Message
from pingpong_bus.errors import (
    ChainError,
    ChainFailed,
    ChainNotFound,
    DaemonUnavailable,
    DataError,
    EngineError,
    EngineLost,
    MessageError,
    NotEqual,
    Overloaded,
    PingpongError,
    StoreError,
    UsageError,
)
from pingpong_bus.messages import (
    AgentResult,
    ChainEvent,
    ChainResult,
    ChainSummary,
    ResumeEntry,
    SchedulerState,
    StatusReply,
    StoreStatus,
    SubmitOptions,
    WorkerStatus,
)
from pingpong_client.certificate import (
    AgentCertificate,
    Certificate,
    Change,
    Comparison,
    Difference,
    RunCertificate,
)
from pingpong_client.certificate_file import read_certificate, write_certificate
from pingpong_client.chain_file import load_chain
from pingpong_client.client import AsyncClient
from pingpong_client.sync_client import Client
from pingpong_client.verification import verify

__all__ = [
    "Agent",
    "AgentCertificate",
    "AgentResult",
    "AsyncClient",
    "Certificate",
    "Chain",
    "ChainError",
    "ChainEvent",
    "ChainFailed",
    "ChainNotFound",
    "ChainResult",
    "ChainSummary",
    "Change",
    "Client",
    "Comparison",
    "DaemonUnavailable",
    "DataError",
    "Difference",
    "EngineError",
    "EngineLost",
    "Message",
    "MessageError",
    "NotEqual",
    "Overloaded",
    "PingpongError",
    "ResumeEntry",
    "RunCertificate",
    "SchedulerState",
    "StatusReply",
    "StoreError",
    "StoreStatus",
    "SubmitOptions",
    "UsageError",
    "WorkerStatus",
    "load_chain",
    "read_certificate",
    "verify",
    "write_certificate",
]
