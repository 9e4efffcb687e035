"""Answers about certified rounds: what each one did, what they came to together, and who contributed."""

from __future__ import annotations

from pydantic import Field

from neuroshard.api.bodies.base import Answer, Layers, Number, Text
from neuroshard.status.rounds import AbandonReason, MemberPart


class RoundMemberBody(Answer):
    """One member's part in a round."""

    node_id: str
    wallet_id: str
    part: MemberPart = Field(description="abstained: it did too little work to count; absent: nothing came of its call")
    refusal: str = Field(description="class of the reason for a refusal, as in /metrics; empty without one")
    reason: Text = Field(description="why its contribution was refused, in words")


class PhasesBody(Answer):
    """Seconds of a round's phases, all its views together."""

    gather: Number = Field(description="until a proposal named the members")
    exchange: Number = Field(description="slices to their reducers, verdict, slices of the aggregate")
    vote: Number = Field(description="check of the aggregate, two votes")


class CertificateBody(Answer):
    """What ended a round."""

    value: str = Field(description="first 16 hex digits of the digest that was voted on")
    votes: int = Field(description="to commit")
    voters: int = Field(description="of the step")


class RoundBody(Answer):
    """One round in which this node took part."""

    stage: int = Field(description="counted from 0")
    layers: Layers
    outer_step: int
    result: str = Field(description='"completed" or "abandoned"')
    abandoned_for: AbandonReason | None = Field(description="null: it completed")
    reason: Text = Field(description="why it was abandoned, in words")
    is_late: bool = Field(description="it completed after training had gone on, and was told as abandoned before")
    ended_at: Number = Field(description="seconds since the epoch")
    seconds: Number = Field(description="from entering it to its end")
    phases: PhasesBody
    members: list[RoundMemberBody]
    bytes_sent: int = Field(description="in messages of rounds since the record before this one")
    bytes_received: int
    strategy: str = Field(description="how replicas synchronise: diloco, streaming, sparta or averaging")
    part: str = Field(
        description='what the round was about, in words: "all weights", "quarter 2 of 4", "slice 7 of 20", "gradient"'
    )
    codec: str = Field(description="how contributions were encoded, as the run's file names it")
    aggregator: str
    views: int = Field(description="tries, each with a proposer of its own")
    certificate: CertificateBody | None = Field(description="null: it was abandoned")


class ContributorBody(Answer):
    """A node's parts in completed rounds, over all stages of this node."""

    node_id: str
    wallet_id: str
    is_here: bool = Field(description="this node")
    rounds: int = Field(description="with a contribution of it")
    accepted: int
    refused: int
    absent: int = Field(description="rounds that it was called to without a contribution")


class RoundsBody(Answer):
    """GET /api/rounds: what this node has seen of rounds since its start."""

    rounds: list[RoundBody] = Field(description="the last 20 of each stage, the newest first")
    completed: int
    abandoned: dict[AbandonReason, int] = Field(description="how many, by class of the reason")
    accepted: int = Field(description="contributions to completed rounds")
    refused: dict[str, int] = Field(description="contributions to completed rounds, by class of the reason")
    bytes_sent: int
    bytes_received: int
    hash_agreement_rate: Number = Field(description="0..1; 1 when alone")
    sync_success_rate: Number = Field(description="0..1; null when there is nobody to synchronise with")
    contributors: list[ContributorBody] = Field(description="most rounds first")
