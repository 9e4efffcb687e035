"""Views of training: pure functions from the snapshot to the answers on training, pipeline and rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import isfinite
from typing import TypeVar

from neuroshard.api.bodies.training import (
    BottleneckBody,
    CertificateBody,
    ContributorBody,
    DilocoProgress,
    FlowBody,
    GlobalBody,
    HistoryBody,
    HistoryHeldOut,
    HistoryPoint,
    HopBody,
    LocalNode,
    MicrobatchTraceBody,
    NetworkNode,
    OwnStageBody,
    PhasesBody,
    PipelineBody,
    PipelineSummary,
    RoundBody,
    RoundMemberBody,
    RoundsBody,
    StageBody,
    StageLoadBody,
    TakeoverBody,
    VerifyBody,
)
from neuroshard.api.rendering import Layers
from neuroshard.status.pipeline import MicrobatchTrace, PipelineFlow, PipelineStage
from neuroshard.status.rounds import Contributor, RoundStatus, StageRoundsStatus
from neuroshard.status.snapshot import (
    DilocoStatus,
    LearningVerdict,
    LossPoint,
    LossTrend,
    ModelStatus,
    NodeState,
    NodeStatus,
    StageStatus,
    SwarmStatus,
)
from neuroshard.types import LayerRange, NodeId, Role

MOST_POINTS = 1_000
Item = TypeVar("Item")


def verify_view(status: NodeStatus) -> VerifyBody:
    """GET /api/training/verify."""
    verification, training = status.verification, status.training
    held_out = training.held_out
    return VerifyBody(
        training_verified=verification.training_verified,
        status=verification.status,
        reason=verification.reason,
        action=verification.action,
        loss_trend=verification.loss_trend,
        hash_agreement_rate=hash_agreement_rate(status),
        sync_success_rate=sync_success_rate(status.diloco),
        global_loss=global_loss(status),
        local_loss=training.loss_ema,
        initial_loss=training.initial_loss,
        steps=training.steps,
        held_out_loss=held_out[-1].loss if held_out else None,
        held_out_initial_loss=held_out[0].loss if held_out else None,
        unigram_entropy=training.unigram_entropy,
    )


def global_view(status: NodeStatus) -> GlobalBody:
    """GET /api/training/global: the run's numbers as far as this node has heard; alone its own."""
    data, diloco, verification, training = status.data, status.diloco, status.verification, status.training
    swarm = status.swarm or SwarmStatus()  # what this node did itself counts at least
    return GlobalBody(
        training_nodes=swarm.training_nodes if status.swarm else _training_nodes(status),
        global_loss=global_loss(status),
        global_min_loss=global_min_loss(status),
        total_steps=max(swarm.total_steps, training.steps),
        total_tokens=max(swarm.total_tokens, training.tokens),
        data_shards=data.total_shards if data else 0,
        data_shards_covered=max(swarm.shards_covered, data.shards_seen if data else 0),
        tokens_per_second=swarm.tokens_per_second if status.swarm else training.tokens_per_second,
        hash_agreement_rate=hash_agreement_rate(status),
        model_hashes=model_hashes(status),
        loss_trend=verification.loss_trend,
        training_verified=verification.training_verified,
        is_converging=is_converging(status),
        successful_syncs=diloco.successful_syncs,
        failed_syncs=diloco.failed_syncs,
        sync_success_rate=sync_success_rate(diloco),
        diloco=diloco_progress(diloco),
        nodes=network_nodes(status),
        local=local_node(status),
    )


def history_view(status: NodeStatus) -> HistoryBody:
    """GET /api/training/history."""
    return HistoryBody(
        points=[history_point(point) for point in thin_out(status.history, MOST_POINTS)],
        held_out=[HistoryHeldOut.model_validate(point) for point in thin_out(status.training.held_out, MOST_POINTS)],
    )


@lru_cache(maxsize=2 * MOST_POINTS)  # from one snapshot to the next nearly all stay, and checking them is dear
def history_point(point: LossPoint) -> HistoryPoint:
    """One point of the curve as it is told."""
    return HistoryPoint.model_validate(point)


def thin_out(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` (>= 2) items evenly over the sequence, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[index * last // (most - 1)] for index in range(most)]


def hash_agreement_rate(status: NodeStatus) -> float:
    """Share of the nodes with the same layers and outer step whose root is the certified one; alone 1.

    Without a certificate of this outer step this node's own root stands for it. A root that is not computed yet, right
    after a round, does not count.
    """
    diloco = status.diloco
    layers = status.model.layers if status.model else None
    others = [
        peer.state_hash
        for peer in status.peers
        if peer.state_hash and peer.outer_step == diloco.outer_steps and peer.layers == layers
    ]
    roots = [diloco.state_root, *others] if diloco.state_root else others
    certified = diloco.certified_root or diloco.state_root
    return sum(root == certified for root in roots) / len(roots) if roots and certified else 1.0


def model_hashes(status: NodeStatus) -> dict[str, str]:
    """State root of every node that told one, this node's own among them."""
    told = dict[str, str](status.swarm.model_hashes) if status.swarm else {}
    own = {status.node_id: status.diloco.state_root} if status.node_id and status.diloco.state_root else {}
    return {**told, **own}


def sync_success_rate(diloco: DilocoStatus) -> float | None:
    """Successful rounds of all rounds with somebody else, since the start where there was one; None without any."""
    completed = sum(stage.completed for stage in diloco.rounds)
    abandoned = sum(count for stage in diloco.rounds for _, count in stage.abandoned)
    if completed + abandoned > 0:
        return completed / (completed + abandoned)
    rounds = diloco.successful_syncs + diloco.failed_syncs
    return None if diloco.members <= 1 or rounds == 0 else diloco.successful_syncs / rounds


def global_loss(status: NodeStatus) -> float | None:
    """The run's loss; from the peers one by one, weighted by tokens a second, while nobody has added it up.

    None before the first loss.
    """
    told = status.swarm.global_loss if status.swarm else None
    if told is not None and isfinite(told):
        return told
    pairs = [(status.training.loss_ema, status.training.tokens_per_second)]
    pairs += [(peer.loss_ema, peer.tokens_per_second) for peer in status.peers]
    known = [(loss, max(weight, 0.0)) for loss, weight in pairs if loss is not None and isfinite(loss + weight)]
    total = sum(weight for _, weight in known)
    if total > 0:
        return sum(loss * (weight / total) for loss, weight in known)
    return sum(loss for loss, _ in known) / len(known) if known else None


def global_min_loss(status: NodeStatus) -> float | None:
    """The lowest loss of the run; of this node's curve while it knows of no other."""
    told = status.swarm.min_loss if status.swarm else None
    if told is not None and isfinite(told):
        return told
    return min(_finite(point.loss for point in status.history), default=None)


def is_converging(status: NodeStatus) -> bool:
    """Whether the model gets better now."""
    verification = status.verification
    return verification.status is not LearningVerdict.DIVERGED and (
        verification.training_verified or verification.loss_trend is LossTrend.IMPROVING
    )


def diloco_progress(diloco: DilocoStatus) -> DilocoProgress:
    """Progress of the inner steps towards the next outer step."""
    total = diloco.inner_steps_total
    return DilocoProgress(
        inner_step=diloco.inner_step,
        inner_steps_total=total,
        progress=min(1.0, max(0.0, diloco.inner_step / total)) if total > 0 else 0.0,
        outer_steps=diloco.outer_steps,
        last_sync=diloco.last_sync,
        members=diloco.members,
        lone_outer=diloco.lone_outer,
        strategy=diloco.strategy,
        part=diloco.part,
        codec=diloco.codec,
        explanation=diloco.explanation,
    )


def network_nodes(status: NodeStatus) -> list[NetworkNode]:
    """This node, once it knows its id, and its peers."""
    local = local_node(status)
    nodes = [
        NetworkNode(
            node_id=peer.node_id,
            wallet_id=peer.wallet_id,
            roles=list(peer.roles),
            role=_role_words(peer.roles),
            layers=Layers.model_validate(peer.layers) if peer.layers else None,
            loss=peer.loss_ema,
            tokens_per_second=peer.tokens_per_second,
            last_seen=peer.last_seen,
            is_local=False,
        )
        for peer in status.peers
    ]
    if status.node_id is None:
        return nodes
    me = NetworkNode(
        node_id=status.node_id,
        wallet_id=status.wallet_id,
        roles=local.roles,
        role=_role_words(local.roles),
        layers=local.layers,
        loss=local.loss_ema,
        tokens_per_second=local.tokens_per_second,
        last_seen=status.time,
        is_local=True,
    )
    return [me, *nodes]


def local_node(status: NodeStatus) -> LocalNode:
    """This node's own part."""
    training, model = status.training, status.model
    return LocalNode(
        node_id=status.node_id,
        state=status.state,
        roles=list(model.roles) if model else [],
        layers=Layers.model_validate(model.layers) if model and model.layers else None,
        loss=training.loss,
        loss_ema=training.loss_ema,
        steps=training.steps,
        tokens=training.tokens,
        tokens_per_second=training.tokens_per_second,
        skipped_steps=training.skipped_steps,
    )


def _training_nodes(status: NodeStatus) -> int:
    return len(status.peers) + (status.state is NodeState.TRAINING)


def _role_words(roles: Sequence[Role]) -> str:
    return "+".join(roles)


def _finite(values: Iterable[float]) -> Iterable[float]:
    return (value for value in values if isfinite(value))


def pipeline_view(status: NodeStatus) -> PipelineBody:
    """GET /api/pipeline."""
    stages = stages_of(status)
    layer_count = status.model.architecture.layer_count if status.model else 0
    held = (stage.layers for stage in stages if not stage.is_missing)
    covered = {layer for layers in held for layer in range(layers.start, min(layers.stop, layer_count))}
    flow = status.pipeline.flow if status.pipeline else None
    return PipelineBody(
        **vars(_summary(status, stages)),
        stages=[_stage_body(stage, status.node_id, layer_count) for stage in stages],
        layer_count=layer_count,
        layers_covered=len(covered),
        coverage=len(covered) / layer_count if layer_count else 0.0,
        complete=0 < layer_count == len(covered),
        own_stages=[_own_stage_body(stage) for stage in status.stages],
        flow=_flow_body(flow) if flow else None,
    )


def pipeline_summary(status: NodeStatus) -> PipelineSummary | None:
    """The part that /api/status tells; None before the stages are known."""
    return _summary(status, status.pipeline.stages) if status.pipeline else None


def stages_of(status: NodeStatus) -> Sequence[PipelineStage]:
    """The stages of the run's plan; before it is known those that nodes hold, by their layers."""
    if status.pipeline is not None:
        return status.pipeline.stages
    return () if status.model is None else _reported_stages(status, status.model)


def missing_layers(stages: Iterable[PipelineStage]) -> list[Layers]:
    """Neighbouring stages as one range."""
    ranges: list[Layers] = []
    for stage in stages:
        start, stop = stage.layers.start, stage.layers.stop
        if stage.is_missing and ranges and ranges[-1].stop == start:
            ranges[-1] = Layers(start=ranges[-1].start, stop=stop)
        elif stage.is_missing:
            ranges.append(Layers(start=start, stop=stop))
    return ranges


def _summary(status: NodeStatus, stages: Sequence[PipelineStage]) -> PipelineSummary:
    return PipelineSummary(
        stage_count=len(stages),
        missing=status.pipeline.missing if status.pipeline else "",
        missing_layers=missing_layers(stages),
    )


def _reported_stages(status: NodeStatus, model: ModelStatus) -> list[PipelineStage]:
    holders: dict[LayerRange, list[NodeId]] = {}
    if model.layers is not None:
        holders[model.layers] = [status.node_id or NodeId("this node")]
    for peer in status.peers:
        if peer.layers is not None:
            holders.setdefault(peer.layers, []).append(peer.node_id)
    return [PipelineStage(index, layers, tuple(holders[layers])) for index, layers in enumerate(sorted(holders))]


def _stage_body(stage: PipelineStage, node_id: NodeId | None, layer_count: int) -> StageBody:
    holders = sorted(stage.holders, key=lambda holder: holder != node_id)
    return StageBody(
        stage=stage.index,
        layers=Layers.model_validate(stage.layers),
        roles=list(stage.layers.roles(layer_count)),
        holders=list(holders),
        paused=list(stage.paused),
        joining=list(stage.joining),
        is_here=node_id in stage.holders,
        is_missing=stage.is_missing,
        is_resting=stage.is_resting,
        has_single_holder=stage.has_single_holder,
        has_copy=None if stage.copy is None else stage.copy.age_seconds is not None,
        copy_age_seconds=None if stage.copy is None else stage.copy.age_seconds,
    )


def _own_stage_body(stage: StageStatus) -> OwnStageBody:
    return OwnStageBody.model_validate({**vars(stage), "stage": stage.index})


def _flow_body(flow: PipelineFlow) -> FlowBody:
    parts = {
        "tokens_per_second": flow.tokens_per_second,
        "loads": [StageLoadBody.model_validate(load) for load in flow.loads],
        "bottleneck": BottleneckBody.model_validate(flow.bottleneck) if flow.bottleneck else None,
        "recent": [_passage_body(passage) for passage in flow.recent],
    }
    return FlowBody.model_validate({**vars(flow), **parts})


def _passage_body(passage: MicrobatchTrace) -> MicrobatchTraceBody:
    hops = [HopBody.model_validate({**vars(hop), "stage": stage}) for stage, hop in enumerate(passage.hops)]
    parts = {
        "other_seconds": passage.other_seconds,
        "hops": hops,
        "takeovers": [TakeoverBody.model_validate(takeover) for takeover in passage.takeovers],
    }
    return MicrobatchTraceBody.model_validate({**vars(passage), **parts})


Name = TypeVar("Name", bound=str)


def rounds_view(status: NodeStatus) -> RoundsBody:
    """GET /api/rounds."""
    stages = status.diloco.rounds
    rounds = [_round_body(stage, record) for stage in stages for record in stage.recent]
    contributors = [one for stage in stages for one in stage.contributors]
    return RoundsBody(
        rounds=sorted(rounds, key=lambda one: (one.ended_at or 0.0, one.stage), reverse=True),
        completed=sum(stage.completed for stage in stages),
        abandoned=summed(stage.abandoned for stage in stages),
        accepted=sum(stage.accepted for stage in stages),
        refused=summed(stage.refused for stage in stages),
        bytes_sent=sum(stage.bytes_sent for stage in stages),
        bytes_received=sum(stage.bytes_received for stage in stages),
        hash_agreement_rate=hash_agreement_rate(status),
        sync_success_rate=sync_success_rate(status.diloco),
        contributors=_contributor_bodies(contributors, status.node_id),
    )


def summed(counts: Iterable[Iterable[tuple[Name, int]]]) -> dict[Name, int]:
    """Counts by name, of all stages together."""
    total = Counter[Name]()
    for of_stage in counts:
        total.update(dict(of_stage))
    return dict(total)


def _round_body(stage: StageRoundsStatus, record: RoundStatus) -> RoundBody:
    certificate = record.certificate
    return RoundBody(
        stage=stage.stage,
        layers=Layers.model_validate(stage.layers),
        outer_step=record.outer_step,
        result="completed" if record.abandoned_for is None else "abandoned",
        abandoned_for=record.abandoned_for,
        reason=record.reason,
        is_late=record.is_late,
        ended_at=record.ended_at,
        seconds=record.seconds.total,
        phases=PhasesBody.model_validate(record.seconds),
        members=[RoundMemberBody.model_validate(one) for one in record.contributions],
        bytes_sent=record.bytes_sent,
        bytes_received=record.bytes_received,
        strategy=record.strategy,
        part=record.part,
        codec=record.codec,
        aggregator=record.aggregator,
        views=record.views,
        certificate=CertificateBody.model_validate(certificate) if certificate else None,
    )


def _contributor_bodies(contributors: Iterable[Contributor], own: NodeId | None) -> list[ContributorBody]:
    by_node: dict[NodeId, list[Contributor]] = {}
    for one in contributors:
        by_node.setdefault(one.node_id, []).append(one)
    bodies = [
        ContributorBody(
            node_id=node,
            wallet_id=parts[0].wallet_id,
            is_here=node == own,
            rounds=sum(one.rounds for one in parts),
            accepted=sum(one.accepted for one in parts),
            refused=sum(one.refused for one in parts),
            absent=sum(one.absent for one in parts),
        )
        for node, parts in by_node.items()
    ]
    return sorted(bodies, key=lambda one: (-one.rounds, one.node_id))
