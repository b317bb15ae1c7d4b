"""What the daemon knows of one agent of a chain: its hops, times, tokens and text."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from pingpong_bus.messages import (
    AppendRecord,
    DraftCounts,
    FinishReason,
    ResumeEntry,
    SeamCounts,
    SessionKind,
    StreamRef,
)
from pingpongd.hop_record import HopRecord, restored
from pingpongd.stored import AgentOutcome


@dataclass
class AgentRecord:
    """One agent's run; times are CLOCK_MONOTONIC in ns, 0 where it has not come to that."""

    hop: str = ""
    hops: int = 0
    """Hops that it was given so far, in this life of the daemon."""
    losses: int = 0
    """Of them, those that a dying worker or engine took along."""
    attempt: int = 1
    worker: str = ""
    may_have_run: bool = False
    """Of a call whose outcome nobody knows: it may have been running when the daemon ended."""
    waits_for: str = ""
    """What keeps it from being dispatched though its turn has come, in words."""
    stream: StreamRef | None = None
    opened_ns: int = 0
    finalized_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    appends: list[AppendRecord] = field(default_factory=list)
    prompt_tokens: int = 0
    prompt_digest: str = ""
    cached_tokens: int = 0
    text: list[str] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    """What stands in its log: of a step, the code points of its text."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    kept: Future[None] | None = None
    """Done when what it has written is on the disk, or failed where it cannot be for now; None: nobody can say."""
    session: SessionKind | None = None
    prompt_token_match: bool | None = None
    drafts: DraftCounts | None = None
    seam: SeamCounts | None = None
    resumed: list[ResumeEntry] = field(default_factory=list)
    resumes_told: int = 0
    """Of `resumed`, those that followers have been told of."""
    entries: list[HopRecord] = field(default_factory=list)
    """Its hops in order, the latest last."""

    @classmethod
    def restored(cls, outcome: AgentOutcome, submitted_ns: int) -> AgentRecord:
        """One that an earlier life of the daemon has kept.

        Args:
            outcome: what it kept.
            submitted_ns: what the chain's submission would have been by today's clock.
        """

        def moment(since_ns: int) -> int:
            return submitted_ns + since_ns if since_ns else 0

        return cls(
            attempt=outcome.attempt,
            worker=outcome.worker,
            opened_ns=moment(outcome.opened_ns),
            finalized_ns=moment(outcome.finalized_ns),
            first_token_ns=moment(outcome.first_token_ns),
            last_token_ns=moment(outcome.last_token_ns),
            appends=[
                AppendRecord(at_ns=moment(it.at_ns), done_ns=moment(it.done_ns), tokens=it.tokens, sent=it.sent)
                for it in outcome.appends
            ],
            prompt_tokens=outcome.prompt_tokens,
            prompt_digest=outcome.prompt_digest,
            cached_tokens=outcome.cached_tokens,
            text=[outcome.text],
            output_ids=outcome.output_ids,
            finish_reason=outcome.finish_reason,
            stop_token=outcome.stop_token,
            session=outcome.session,
            prompt_token_match=outcome.prompt_token_match,
            drafts=outcome.drafts,
            seam=outcome.seam,
            resumed=outcome.resumed,
            entries=restored(outcome.hops, submitted_ns),
        )

    @property
    def moves(self) -> int:
        """Of its hops, those that were taken off a group whose tokens came late."""
        return sum(hop.state == "moved" for hop in self.entries)

    @property
    def read(self) -> int:
        """Prompt tokens that its latest hop has read ahead; what earlier ones had read is on other groups."""
        if not self.appends or not self.entries or self.appends[-1].at_ns < self.entries[-1].started_ns:
            return 0
        return self.appends[-1].sent

    @property
    def text_chars(self) -> int:
        """Characters of text so far."""
        return sum(map(len, self.text))

    def add_counts(self, drafts: DraftCounts | None, seam: SeamCounts | None) -> None:
        """Enter how guessing and joining went in a hop of its that has ended."""
        if drafts is not None:
            before = self.drafts or DraftCounts(steps=0, drafted=0, accepted=0)
            self.drafts = DraftCounts(
                steps=before.steps + drafts.steps,
                drafted=before.drafted + drafts.drafted,
                accepted=before.accepted + drafts.accepted,
            )
        if seam is not None:
            known = self.seam or SeamCounts(rollbacks=0, tokens=0)
            self.seam = SeamCounts(rollbacks=known.rollbacks + seam.rollbacks, tokens=known.tokens + seam.tokens)

    def begin_anew(self) -> None:
        """Forget what it has written: the log that held it is gone."""
        self.attempt += 1
        self.first_token_ns = 0
        self.output_ids, self.text = [], []

    def outcome(self, submitted_ns: int, devices: Mapping[str, list[str]]) -> AgentOutcome:
        """What the store keeps of it once it has finished.

        Args:
            submitted_ns: when its chain was submitted.
            devices: of workers; those of its own are kept.
        """
        assert self.finish_reason is not None  # noqa: S101 - it has finished

        def since(at_ns: int) -> int:
            return at_ns - submitted_ns if at_ns else 0

        return AgentOutcome(
            worker=self.worker,
            output_ids=self.output_ids,
            text="".join(self.text),
            finish_reason=self.finish_reason,
            stop_token=self.stop_token,
            session=self.session,
            prompt_tokens=self.prompt_tokens,
            prompt_digest=self.prompt_digest,
            cached_tokens=self.cached_tokens,
            prompt_token_match=self.prompt_token_match,
            drafts=self.drafts,
            seam=self.seam,
            appends=[
                AppendRecord(at_ns=since(it.at_ns), done_ns=since(it.done_ns), tokens=it.tokens, sent=it.sent)
                for it in self.appends
            ],
            opened_ns=since(self.opened_ns),
            finalized_ns=since(self.finalized_ns),
            first_token_ns=since(self.first_token_ns),
            last_token_ns=since(self.last_token_ns),
            attempt=self.attempt,
            resumed=self.resumed,
            hops=[hop.entry(submitted_ns, len(self.output_ids)) for hop in self.entries],
            devices={hop.worker: devices[hop.worker] for hop in self.entries if hop.worker in devices},
        )
