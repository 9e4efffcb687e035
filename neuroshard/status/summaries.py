"""Responses of the API's routes: summaries that combine several parts of one snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Annotated, Literal, TypeAlias, TypeVar

from neuroshard.status.data import DataStatus
from neuroshard.status.history import FeedEvent, WorkDone, WorkSpan
from neuroshard.status.pipeline import PipelineFlow, PipelineStage, missing_ranges
from neuroshard.status.rounds import AbandonReason, Contributor, RoundStatus, Voter
from neuroshard.status.snapshot import (
    DilocoStatus,
    HeldOutPoint,
    LossPoint,
    LossTrend,
    ModelStatus,
    NetworkStatus,
    NodeState,
    NodeStatus,
    PeerStatus,
    StageStatus,
    SwarmStatus,
    TrainingStatus,
    VerificationStatus,
)
from neuroshard.status.values import Number, Stale, about, counted, finite
from neuroshard.types import LayerRange, NodeId, Role, WalletId

MOST_POINTS = 1_000
SpanName: TypeAlias = Literal["day", "week", "all"]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class LearningSummary(VerificationStatus):
    """GET /api/training/verify: the verdict on learning, and the numbers behind it."""

    hash_agreement_rate: Annotated[Number, about("1 when alone", "0..1")]
    sync_success_rate: Annotated[Number | None, about("null without a round with others", "0..1")]
    global_loss: Annotated[Number | None, about("of the run", "nats/token")]
    local_loss: Annotated[Number | None, about("of this node, smoothed", "nats/token")]
    initial_loss: Annotated[Number | None, about("mean of the run's first steps", "nats/token")]
    steps: int
    held_out_loss: Annotated[Number | None, about("last evaluation", "nats/token")]
    held_out_initial_loss: Annotated[Number | None, about("first evaluation", "nats/token")]
    unigram_entropy: Annotated[
        Number | None, about("held-out loss of a model that knows token frequencies only", "nats/token")
    ]


def learning_summary(status: NodeStatus) -> LearningSummary:
    """Whether the model learns: the verdict, which rests on held-out data, and the numbers behind it."""
    training = status.training
    return LearningSummary(
        **vars(status.verification),
        hash_agreement_rate=hash_agreement_rate(status),
        sync_success_rate=status.diloco.sync_success_rate,
        global_loss=global_loss(status),
        local_loss=training.loss_ema,
        initial_loss=training.initial_loss,
        steps=training.steps,
        held_out_loss=training.held_out_loss,
        held_out_initial_loss=training.held_out[0].loss if training.held_out else None,
        unigram_entropy=training.unigram_entropy,
    )


@dataclass(frozen=True)
class RunNode:
    """One node of the run, this node or a peer."""

    node_id: NodeId
    wallet_id: WalletId | None
    roles: tuple[Role, ...]
    role: Annotated[str, about('roles joined by "+", for people')]
    layers: LayerRange | None
    loss: Annotated[Number | None, about("smoothed", "nats/token")]
    tokens_per_second: Annotated[Number, about(unit="tokens/s", stale=Stale.IDLE_PEER)]
    last_seen: Annotated[Number, about(unit="s since 1970")]
    is_local: Annotated[bool, about("this node")]


@dataclass(frozen=True)
class PublicRunSummary:
    """GET /api/training/global without a key: totals over all nodes of the run."""

    training_nodes: int
    global_loss: Annotated[Number | None, about("mean weighted by tokens", "nats/token")]
    global_min_loss: Annotated[Number | None, about("lowest loss of the run", "nats/token")]
    total_steps: int
    total_tokens: Annotated[int, about(unit="tokens")]
    data_shards: int
    data_shards_covered: int
    tokens_per_second: Annotated[
        Number,
        about("sum over the training nodes with the first layers", "tokens/s", stale=Stale.OLD_SNAPSHOT),
    ]
    hash_agreement_rate: Annotated[Number, about("1 when alone", "0..1")]
    loss_trend: LossTrend
    training_verified: bool
    is_converging: bool
    successful_syncs: int
    failed_syncs: int
    sync_success_rate: Annotated[Number | None, about("null without a round with others", "0..1")]
    diloco: DilocoStatus


@dataclass(frozen=True)
class RunSummary(PublicRunSummary):
    """GET /api/training/global: totals over all nodes of the run, each node's numbers, and this node's own status."""

    model_hashes: Annotated[dict[str, str], about("state root of each node that reported one")]
    nodes: tuple[RunNode, ...]
    local: TrainingStatus


def public_run_summary(status: NodeStatus) -> PublicRunSummary:
    """Totals over all nodes of the run; with a key also `model_hashes`, `nodes` and `local`."""
    whole = run_summary(status)
    return PublicRunSummary(**{field.name: getattr(whole, field.name) for field in fields(PublicRunSummary)})


def run_summary(status: NodeStatus) -> RunSummary:
    """Totals over all nodes of the run, each node's numbers, and this node's training status.

    Without a key, only the totals: neither `model_hashes` nor `nodes` nor `local`.
    """
    data, diloco, verification, training = status.data, status.diloco, status.verification, status.training
    alone = SwarmStatus(  # before the first look at the network
        training_nodes=len(status.peers) + (status.state is NodeState.TRAINING),
        tokens_per_second=training.tokens_per_second,
    )
    swarm = status.swarm or alone
    return RunSummary(
        training_nodes=swarm.training_nodes,
        global_loss=global_loss(status),
        global_min_loss=_min_loss(status),
        total_steps=max(swarm.total_steps, training.steps),
        total_tokens=max(swarm.total_tokens, training.tokens),
        data_shards=data.total_shards if data else 0,
        data_shards_covered=max(swarm.shards_covered, data.shards_seen if data else 0),
        tokens_per_second=swarm.tokens_per_second,
        hash_agreement_rate=hash_agreement_rate(status),
        model_hashes=_model_hashes(status),
        loss_trend=verification.loss_trend,
        training_verified=verification.training_verified,
        is_converging=verification.is_converging,
        successful_syncs=diloco.successful_syncs,
        failed_syncs=diloco.failed_syncs,
        sync_success_rate=diloco.sync_success_rate,
        diloco=diloco,
        nodes=_nodes(status),
        local=training,
    )


def hash_agreement_rate(status: NodeStatus) -> float:
    """Share of the nodes with the same layers and outer step whose state root is the certified one; 1 when alone.

    Without a certificate of this outer step, this node's own root is used instead. A root that is not computed yet,
    directly after a round, does not count.
    """
    diloco, layers = status.diloco, status.layers
    others = [
        peer.state_hash
        for peer in status.peers
        if peer.state_hash and peer.outer_step == diloco.outer_steps and peer.layers == layers
    ]
    roots = [diloco.state_root, *others] if diloco.state_root else others
    certified = diloco.certified_root or diloco.state_root
    return sum(root == certified for root in roots) / len(roots) if roots and certified else 1.0


def global_loss(status: NodeStatus) -> float | None:
    """Loss of the run in nats per token; None if no node has reported one.

    Before the swarm status has a loss, it is the mean over the known nodes, weighted by tokens per second.
    """
    reported = finite([status.swarm.global_loss if status.swarm else None])
    if reported:
        return reported[0]
    pairs = [(status.training.loss_ema, status.training.tokens_per_second)]
    pairs += [(peer.loss_ema, peer.tokens_per_second) for peer in status.peers]
    known = [(loss, weight) for loss, weight in pairs if loss is not None and isfinite(loss)]
    weights = [max(weight, 0.0) if isfinite(weight) else 0.0 for _, weight in known]
    total = sum(weights)
    if total > 0:
        return sum(loss * (weight / total) for (loss, _), weight in zip(known, weights, strict=True))
    return sum(loss for loss, _ in known) / len(known) if known else None


def _min_loss(status: NodeStatus) -> float | None:
    reported = finite([status.swarm.min_loss if status.swarm else None])
    return reported[0] if reported else min(finite(point.loss for point in status.history), default=None)


def _model_hashes(status: NodeStatus) -> dict[str, str]:
    reported = dict[str, str](status.swarm.model_hashes) if status.swarm else {}
    own = {status.node_id: status.diloco.state_root} if status.node_id and status.diloco.state_root else {}
    return {**reported, **own}


def _nodes(status: NodeStatus) -> tuple[RunNode, ...]:
    peers = tuple(
        RunNode(
            peer.node_id,
            peer.wallet_id,
            peer.roles,
            peer.role,
            peer.layers,
            peer.loss_ema,
            peer.tokens_per_second,
            peer.last_seen,
            is_local=False,
        )
        for peer in status.peers
    )
    if status.node_id is None:
        return peers
    training = status.training
    own = RunNode(
        status.node_id,
        status.wallet_id,
        status.roles,
        "+".join(status.roles),
        status.layers,
        training.loss_ema,
        training.tokens_per_second,
        status.time,
        is_local=True,
    )
    return (own, *peers)


@dataclass(frozen=True)
class LossHistory:
    """GET /api/training/history: the training curve and the evaluations, at most 1,000 points each, oldest first."""

    points: tuple[LossPoint, ...]
    held_out: tuple[HeldOutPoint, ...]


def loss_history(status: NodeStatus) -> LossHistory:
    """The training curve and the evaluations, oldest first, thinned out to at most 1,000 points each."""
    return LossHistory(thin_out(status.history, MOST_POINTS), thin_out(status.training.held_out, MOST_POINTS))


def thin_out(items: Sequence[Item], most: int) -> tuple[Item, ...]:
    """Pick at most `most` (>= 2) items, evenly spaced over the sequence, including the first and the last."""
    if len(items) <= most:
        return tuple(items)
    last = len(items) - 1
    return tuple(items[index * last // (most - 1)] for index in range(most))


@dataclass(frozen=True)
class WorkSummary:
    """GET /api/contribution: work of this computer for every run that the data folder has served."""

    span: SpanName
    width_seconds: Annotated[float, about("width of each period; it doubles as the record gets longer", "s")]
    points: Annotated[tuple[WorkDone, ...], about("oldest first; periods without work are left out")]
    total: Annotated[WorkDone | None, about("since the beginning of the record; null: no work yet")]


def work_summary(status: NodeStatus, name: SpanName) -> WorkSummary:
    """Work of this computer for training over the last day, the last week or all time."""
    span: WorkSpan = getattr(status.contribution, name)
    return WorkSummary(name, span.width_seconds, span.points, status.contribution.total)


@dataclass(frozen=True)
class RunStage:
    """One stage of the run's plan and its holders, seen from this node."""

    stage: Annotated[int, about("number of the stage, counted from 0")]
    layers: Annotated[LayerRange, about("layers of the stage")]
    roles: Annotated[tuple[Role, ...], about("roles of a node that holds this stage alone")]
    holders: Annotated[
        tuple[NodeId, ...], about("all nodes of the stage: this node first, then the nodes that can work on it now")
    ]
    paused: Annotated[tuple[NodeId, ...], about("holders that have its weights and are paused")]
    joining: Annotated[tuple[NodeId, ...], about("holders that prepare for it and have no weights yet")]
    is_here: Annotated[bool, about("this node is one of the holders")]
    is_missing: Annotated[bool, about("no node has its weights, so nothing is trained")]
    is_resting: Annotated[bool, about("all nodes with its weights are paused, so nothing is trained")]
    has_single_holder: Annotated[bool, about("only one node has its weights")]
    has_copy: Annotated[bool | None, about("another node keeps a copy of a single holder's state; null: not known")]
    copy_age_seconds: Annotated[
        Number | None, about("age of that copy, the work that would be lost with the holder; null without a copy", "s")
    ]


@dataclass(frozen=True)
class PipelineSummary:
    """GET /api/pipeline: every stage of the run's plan, and the flow of the microbatches through them."""

    stage_count: int
    missing: Annotated[str, about("layers that no node has at hand, in a sentence, counted from 1; may be empty")]
    missing_layers: Annotated[tuple[LayerRange, ...], about("the same layers as ranges counted from 0")]
    stages: tuple[RunStage, ...]
    layer_count: int
    layers_covered: Annotated[int, about("layers whose weights at least one node has at hand")]
    coverage: Annotated[Number, about("share of the layers that at least one node has at hand", "0..1")]
    complete: Annotated[bool, about("no stage is missing")]
    own_stages: Annotated[tuple[StageStatus, ...], about("stages that this node holds")]
    flow: Annotated[PipelineFlow | None, about("null on a node that drives no microbatches")]


def pipeline_summary(status: NodeStatus) -> PipelineSummary:
    """Stages of the run's plan and their holders, and the flow of this node's microbatches through them."""
    stages = _stages(status)
    layer_count = status.model.architecture.layer_count if status.model else 0
    held = (stage.layers for stage in stages if not stage.is_missing)
    covered = {layer for layers in held for layer in range(layers.start, min(layers.stop, layer_count))}
    return PipelineSummary(
        stage_count=len(stages),
        missing=status.pipeline.missing if status.pipeline else "",
        missing_layers=missing_ranges(stages),
        stages=tuple(_run_stage(stage, status.node_id, layer_count) for stage in stages),
        layer_count=layer_count,
        layers_covered=len(covered),
        coverage=len(covered) / layer_count if layer_count else 0.0,
        complete=0 < layer_count == len(covered),
        own_stages=status.stages,
        flow=status.pipeline.flow if status.pipeline else None,
    )


def _stages(status: NodeStatus) -> Sequence[PipelineStage]:
    """The stages of the run's plan. Before it is known, each range of layers that a node reports counts as one."""
    if status.pipeline is not None:
        return status.pipeline.stages
    return () if status.model is None else _reported_stages(status, status.model)


def _reported_stages(status: NodeStatus, model: ModelStatus) -> list[PipelineStage]:
    holders: dict[LayerRange, list[NodeId]] = {}
    if model.layers is not None:
        holders[model.layers] = [status.node_id or NodeId("this node")]
    for peer in status.peers:
        if peer.layers is not None:
            holders.setdefault(peer.layers, []).append(peer.node_id)
    return [PipelineStage(index, layers, tuple(holders[layers])) for index, layers in enumerate(sorted(holders))]


def _run_stage(stage: PipelineStage, node_id: NodeId | None, layer_count: int) -> RunStage:
    return RunStage(
        stage=stage.index,
        layers=stage.layers,
        roles=stage.layers.roles(layer_count),
        holders=tuple(sorted(stage.holders, key=lambda holder: holder != node_id)),
        paused=stage.paused,
        joining=stage.joining,
        is_here=node_id in stage.holders,
        is_missing=stage.is_missing,
        is_resting=stage.is_resting,
        has_single_holder=stage.has_single_holder,
        has_copy=None if stage.copy is None else stage.copy.age_seconds is not None,
        copy_age_seconds=None if stage.copy is None else stage.copy.age_seconds,
    )


@dataclass(frozen=True, kw_only=True)
class RunRound(RoundStatus):
    """One round, with its stage."""

    stage: Annotated[int, about("number of the stage, counted from 0")]
    layers: Annotated[LayerRange, about("layers of the stage")]


@dataclass(frozen=True, kw_only=True)
class RunContributor(Contributor):
    """A node's parts in completed rounds, added up over all stages of this node."""

    is_here: Annotated[bool, about("this node")]


@dataclass(frozen=True, kw_only=True)
class StageVoter(Voter):
    """A seat of a stage that this node holds."""

    stage: Annotated[int, about("index of the run's stage, counted from 0")]
    is_here: Annotated[bool, about("this node")]


@dataclass(frozen=True)
class RoundsSummary:
    """GET /api/rounds: the rounds in which this node has taken part since its start."""

    rounds: Annotated[tuple[RunRound, ...], about("the last 20 of each stage, the newest first")]
    completed: int
    abandoned: Annotated[dict[AbandonReason, int], about("by class of the reason")]
    accepted: Annotated[int, about("contributions to completed rounds")]
    refused: Annotated[dict[str, int], about("contributions to completed rounds, by class of the reason")]
    bytes_sent: Annotated[int, about(unit="bytes")]
    bytes_received: Annotated[int, about(unit="bytes")]
    skipped_audits: Annotated[
        int, about("audits of results that this node skipped because a member did not send its blocks in 5 s")
    ]
    hash_agreement_rate: Annotated[Number, about("1 when alone", "0..1")]
    sync_success_rate: Annotated[Number | None, about("null without a round with others", "0..1")]
    contributors: Annotated[tuple[RunContributor, ...], about("most rounds first")]
    voters: Annotated[tuple[StageVoter, ...], about("the seats of each stage, in order of seating")]


def rounds_summary(status: NodeStatus) -> RoundsSummary:
    """The last rounds in which this node agreed with others on one aggregate, and the contributors."""
    stages = status.diloco.rounds
    rounds = [
        RunRound(**vars(record), stage=stage.stage, layers=stage.layers) for stage in stages for record in stage.recent
    ]
    return RoundsSummary(
        rounds=tuple(sorted(rounds, key=lambda one: (one.ended_at or 0.0, one.stage), reverse=True)),
        completed=sum(stage.completed for stage in stages),
        abandoned=counted(pair for stage in stages for pair in stage.abandoned),
        accepted=sum(stage.accepted for stage in stages),
        refused=counted(pair for stage in stages for pair in stage.refused),
        bytes_sent=sum(stage.bytes_sent for stage in stages),
        bytes_received=sum(stage.bytes_received for stage in stages),
        skipped_audits=sum(stage.skipped_audits for stage in stages),
        hash_agreement_rate=hash_agreement_rate(status),
        sync_success_rate=status.diloco.sync_success_rate,
        contributors=_contributors((one for stage in stages for one in stage.contributors), status.node_id),
        voters=tuple(
            StageVoter(**vars(voter), stage=stage.stage, is_here=voter.node_id == status.node_id)
            for stage in stages
            for voter in stage.voters
        ),
    )


def _contributors(contributors: Iterable[Contributor], own: NodeId | None) -> tuple[RunContributor, ...]:
    by_node: dict[NodeId, list[Contributor]] = {}
    for one in contributors:
        by_node.setdefault(one.node_id, []).append(one)
    merged = (
        RunContributor(
            node_id=node,
            wallet_id=parts[0].wallet_id,
            accepted=sum(one.accepted for one in parts),
            refused=sum(one.refused for one in parts),
            absent=sum(one.absent for one in parts),
            sequences=sum(one.sequences for one in parts),
            is_here=node == own,
        )
        for node, parts in by_node.items()
    )
    return tuple(sorted(merged, key=lambda one: (-one.rounds, one.node_id)))


@dataclass(frozen=True)
class PeersSummary:
    """GET /api/peers: this node's connections, and every other node of the run."""

    count: Annotated[int, about("other nodes of the run")]
    network: NetworkStatus
    swarm: SwarmStatus | None
    peers: tuple[PeerStatus, ...]


def peers_summary(status: NodeStatus) -> PeersSummary:
    """This node's connections, its addresses and join command, and every other node of the run."""
    return PeersSummary(len(status.peers), status.network, status.swarm, status.peers)


@dataclass(frozen=True)
class FeedSummary:
    """GET /api/feed: the events of the node and its run since this start."""

    events: Annotated[tuple[FeedEvent, ...], about("newest first, at most 50")]


def feed_summary(status: NodeStatus) -> FeedSummary:
    """The events of the node and its run since this start, in sentences."""
    return FeedSummary(status.feed)


@dataclass(frozen=True)
class DataSummary:
    """GET /api/data: Genesis data, cache and downloads."""

    data: Annotated[DataStatus | None, about("null until the manifest was read")]


def data_summary(status: NodeStatus) -> DataSummary:
    """Genesis data on this node: its shards, the cache and the downloads in progress."""
    return DataSummary(status.data)
