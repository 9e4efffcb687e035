"""Snapshots of a node among others, of their rounds, and of pipelines: three stages, a gap, a crowd."""

from __future__ import annotations

import time
from dataclasses import replace
from hashlib import sha256

import snapshots

from neuroshard.consensus.round_status import with_round
from neuroshard.model.architecture import StagePlan
from neuroshard.node.observation import among_replicas
from neuroshard.pipeline.microbatch_call import flow_of
from neuroshard.status.pipeline import (
    HopTimes,
    MicrobatchTrace,
    PipelineFlow,
    PipelineStage,
    PipelineStatus,
    Takeover,
)
from neuroshard.status.rounds import (
    AbandonReason,
    CertificateStatus,
    MemberPart,
    PhaseSeconds,
    RoundContribution,
    RoundStatus,
    StageRoundsStatus,
    Voter,
)
from neuroshard.status.snapshot import (
    ConnectionKind,
    DilocoStatus,
    ModelStatus,
    NetworkState,
    NetworkStatus,
    NodeState,
    NodeStatus,
    PeerStatus,
    RunStatus,
    StageStatus,
    SwarmStatus,
)
from neuroshard.types import LayerRange, NodeId, Role, RunId, ShardId, WalletId

JOIN_LINE = (
    f"neuroshard --run {'4b' * 32} "
    "--peer /ip4/203.0.113.7/tcp/43817/p2p/12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc"
)
KINDS = (ConnectionKind.DIRECT, ConnectionKind.PUNCHED, ConnectionKind.RELAYED, None)
STATES = (NodeState.TRAINING,) * 4 + (NodeState.PAUSED,)
SCORES = (12.0, 0.0, 4.0, -20.0, -70.0)
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def peer_id(number: int) -> NodeId:
    """An id of the usual length, different at both ends."""
    digest = sha256(b"peer %d" % number).digest()
    return NodeId("12D3KooW" + "".join(ALPHABET[digest[index % 32] % 58] for index in range(44)))


def peer(number: int, now: float) -> PeerStatus:
    """Peers differ in every way that the dashboard shows."""
    kind = KINDS[number % len(KINDS)]
    state = STATES[number % len(STATES)]
    return PeerStatus(
        node_id=peer_id(number),
        wallet_id=WalletId(sha256(b"wallet %d" % number).hexdigest()[:16]),
        roles=(Role.DRIVER, Role.VALIDATOR),
        layers=LayerRange(0, 6),
        loss_ema=3.4 + number % 97 / 200,
        tokens_per_second=7_200.0 / (1 + number % 6) - number / 1_000 if state is NodeState.TRAINING else 0.0,
        last_seen=now - 2 - number % 9,
        steps=900 - number % 300,
        tokens=(900 - number % 300) * 2048,
        shard=ShardId(number % 16),
        state=state,
        started_at=now - 5_000 - number,
        first_seen=now - 40 * (number + 1),
        version="0.1.0",
        connection=kind,
        address="" if kind is None else f"/ip4/198.51.100.{number % 250}/tcp/{40_000 + number}",
        rtt_seconds=None if kind is None else (8 + number % 60) / 1000,
        bytes_sent=0 if kind is None else 310_000 + 1_000 * number,
        bytes_received=0 if kind is None else 280_000 + 2_000 * number,
        score=SCORES[number % len(SCORES)],
    )


def among(count: int) -> NodeStatus:
    """A node that trains with `count` others."""
    status = snapshots.training()
    now = status.time
    peers = tuple(peer(number, now) for number in range(count))
    own = status.training
    training = [one for one in peers if one.state == NodeState.TRAINING]
    swarm = SwarmStatus(
        nodes=count + 1,
        training_nodes=len(training) + 1,
        global_loss=3.512,
        min_loss=3.401,
        total_steps=own.steps + sum(one.steps for one in peers),
        total_tokens=own.tokens + sum(one.tokens for one in peers),
        shards_covered=min(15, 3 + count),
        tokens_per_second=own.tokens_per_second + sum(one.tokens_per_second for one in training),
    )
    network = NetworkStatus(
        state=NetworkState.CONNECTED,
        explanation=f"Connected with {sum(one.connection is not None for one in peers)} nodes of this run.",
        addresses=(
            "/ip4/203.0.113.7/tcp/43817/p2p/12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc",
            "/ip4/192.168.1.20/tcp/43817/p2p/12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc",
        ),
        connections=sum(one.connection is not None for one in peers),
        bytes_sent=33_400_000,
        bytes_received=81_200_000,
        upload_rate=12_300.0,
        download_rate=40_700.0,
        upload_limit=1_000_000.0,
        banned_peers=1,
        refused=(("bad_signature", 1), ("expired_claim", 14)),
        join_line=JOIN_LINE,
    )
    return replace(
        status,
        state_reason=f"Training with {count} others.",
        run=RunStatus(
            RunId("4b" * 32), is_own=False, is_demo=False, explanation="It serves the run it was invited to."
        ),
        peers=peers,
        network=network,
        swarm=swarm,
        diloco=among_replicas(
            DilocoStatus(inner_step=264, inner_steps_total=500, outer_steps=1), count, holds_all=True
        ),
    )


def alone(*addresses: str) -> NodeStatus:
    """A node that can be reached, and nobody does."""
    network = NetworkStatus(
        NetworkState.ALONE,
        "The network runs; nobody else was found yet.",
        addresses or ("/ip4/203.0.113.7/tcp/43817/p2p/12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc",),
        join_line=JOIN_LINE,
    )
    run = RunStatus(RunId("4b" * 32), is_own=True, is_demo=False, explanation="It trains a run of its own.")
    return replace(
        snapshots.training(), run=run, network=network, swarm=SwarmStatus(training_nodes=1, global_loss=3.605)
    )


def later(status: NodeStatus) -> NodeStatus:
    """The same moment's peers, heard of again a second later."""
    peers = tuple(replace(one, steps=one.steps + 1, last_seen=time.time()) for one in status.peers)
    return replace(status, peers=peers)


ME = snapshots.training().node_id or NodeId("")
ROOT = "5a" * 32
BAD, GONE, SLOW = peer_id(2), peer_id(1), peer_id(3)
BROKEN_OFF = 11  # the round that came to nothing


def contribution(
    node: NodeId, part: MemberPart = MemberPart.ACCEPTED, refusal: str = "", reason: str = ""
) -> RoundContribution:
    return RoundContribution(node, WalletId(sha256(node.encode()).hexdigest()[:16]), part, refusal, reason)


def completed(number: int, *contributions: RoundContribution) -> RoundStatus:
    """The round of an outer step; a higher number is more recent."""
    return RoundStatus(
        outer_step=number,
        ended_at=time.time() - 60.0 * (12 - number) - 5,
        phases=PhaseSeconds(0.25, 1.5 + number % 3, 0.5),
        members=contributions or (contribution(ME), contribution(GONE), contribution(BAD)),
        bytes_sent=18_900_000,
        bytes_received=17_400_000,
        strategy="streaming",
        part=f"quarter {number % 4 + 1} of 4",
        codec="int8",
        aggregator="trimmed_mean(0.2)",
        certificate=CertificateStatus(sha256(b"%d" % number).hexdigest()[:16], 3, 3),
    )


def abandoned(number: int, kind: AbandonReason = AbandonReason.NO_ANSWER) -> RoundStatus:
    """A round in vain, told with all who were called."""
    called = tuple(contribution(node, MemberPart.UNJUDGED) for node in (ME, GONE, BAD))
    return replace(
        completed(number, *called),
        phases=PhaseSeconds(40.0, 0.0, 0.0),
        certificate=None,
        abandoned_for=kind,
        reason="too few members answered in time",
    )


def with_rounds(*records: RoundStatus, stages: int = 1) -> NodeStatus:
    """A node among three others whose stages all had these rounds."""
    told: list[StageRoundsStatus] = []
    for index in range(stages):
        rounds = StageRoundsStatus(index, LayerRange(3 * index, 3 * index + 3) if stages > 1 else LayerRange(0, 6))
        for record in records:
            rounds = with_round(rounds, replace(record, ended_at=record.ended_at + index))
        told.append(rounds)
    status = among(3)
    diloco = replace(
        status.diloco,
        members=3,
        outer_steps=len(records),
        strategy="streaming",
        part=f"quarter {len(records) % 4 + 1} of 4",
        codec="int8",
        explanation="The last round had 3 members.",
        state_root=ROOT,
        certified_root=ROOT,
        rounds=tuple(told),
    )
    return replace(status, diloco=diloco)


def agreeing() -> NodeStatus:
    """Two rounds in which everybody's work counted."""
    return with_rounds(completed(10), completed(11))


def voting() -> NodeStatus:
    """Three computers vote, and one of them does not answer."""
    status = agreeing()
    seats = tuple(Voter(node, contribution(node).wallet_id, node == ME, node != GONE) for node in (ME, SLOW, GONE))
    (stage,) = status.diloco.rounds
    return replace(status, diloco=replace(status.diloco, rounds=(replace(stage, voters=seats),)))


def eventful() -> NodeStatus:
    """One member was refused, one had done too little, one sent nothing, one round was in vain, one ended late."""
    far = "its norm is far from the median norm"
    refused = completed(
        10,
        contribution(ME),
        contribution(GONE, MemberPart.ABSENT),
        contribution(BAD, MemberPart.REFUSED, "norm", far),
        contribution(SLOW, MemberPart.ABSTAINED),
    )
    late = replace(completed(12), is_late=True, views=2, skipped_audits=1)
    return with_rounds(*(completed(number) for number in range(10)), refused, abandoned(BROKEN_OFF), late)


def in_vain() -> NodeStatus:
    """Every round so far was abandoned, each for another reason."""
    return with_rounds(*(abandoned(number + 9, kind) for number, kind in enumerate(AbandonReason)))


def in_two_stages() -> NodeStatus:
    """This node holds two stages, which agree by themselves."""
    return with_rounds(completed(10), completed(11), stages=2)


def crowded() -> NodeStatus:
    """A round of 64 of whom most sent nothing."""
    parts = [contribution(peer_id(number), MemberPart.ABSENT) for number in range(40)]
    parts += [contribution(peer_id(number)) for number in range(40, 63)]
    return with_rounds(*(completed(number, contribution(ME), *parts) for number in range(12)))


LAYERS = 12
TAKEN_OVER = 20  # the microbatch in which another computer took over


def holders(stages: int, replicas: int) -> tuple[PipelineStage, ...]:
    """Every stage at `replicas` nodes of its own; this node has the first one."""
    plan = StagePlan.even(max(LAYERS, stages), stages)
    rows: list[PipelineStage] = []
    for index, layers in enumerate(plan):
        nodes = tuple(peer_id(index * replicas + number) for number in range(replicas))
        rows.append(PipelineStage(index, layers, (ME, *nodes[1:]) if index == 0 else nodes))
    return tuple(rows)


def traces(stages: tuple[PipelineStage, ...], count: int = 32) -> tuple[MicrobatchTrace, ...]:
    """Microbatches whose second stage takes longest; in one of them it was taken over."""
    now = time.time()
    rows: list[MicrobatchTrace] = []
    for number in range(count):
        hops = tuple(
            HopTimes(
                stage.ready[number % len(stage.ready)],
                compute_seconds=0.125 if stage.index != 1 else 0.25,
                wait_seconds=0.0625 if stage.index != 1 else 0.5,
                wire_seconds=0.03125 if stage.index else 0.0,
                bytes_sent=262_144 if stage.index else 0,
                bytes_received=262_144 if stage.index else 0,
            )
            for stage in stages
        )
        is_taken_over = number == TAKEN_OVER and len(stages) > 1
        takeovers = (Takeover(1, peer_id(900), hops[1].node_id, is_exact=False),) if is_taken_over else ()
        lost = 0.5 if is_taken_over else 0.0
        seconds = sum(hop.seconds for hop in hops) + lost
        rows.append(
            MicrobatchTrace(
                5, number, now - 2 * (count - number), seconds, 1024, hops, takeovers, failures=len(takeovers)
            )
        )
    return tuple(rows)


def flow(stages: tuple[PipelineStage, ...]) -> PipelineFlow:
    """What a driver tells of the last minute."""
    recent = traces(stages)
    return replace(flow_of(recent, 60.0), exact_takeovers=2, approximate_takeovers=1, failures=4, recent=recent)


def own_stage(stage: PipelineStage) -> StageStatus:
    """With three of eight sequences for the next step."""
    return StageStatus(stage.index, stage.layers, 764, 1, 3.605, 0.42, 3, 8, 2, 1, "ab" * 32, 750)


def driver(stages: tuple[PipelineStage, ...] | None = None) -> NodeStatus:
    """Drives a run of three stages on three computers."""
    stages = stages or holders(3, 1)
    status = among(max(len(stages) - 1, 1))
    assert status.model is not None
    layers = stages[0].layers
    count = stages[-1].layers.stop
    shape = replace(status.model.architecture, layer_count=count)
    return replace(
        status,
        model=ModelStatus(shape, 9_412_352, layers, layers.roles(count)),
        stages=(own_stage(stages[0]),),
        pipeline=PipelineStatus(stages, "", flow(stages)),
    )


def worker() -> NodeStatus:
    """Holds the middle one of three stages and drives nothing."""
    status = driver()
    assert status.pipeline is not None
    assert status.model is not None
    first, middle, last = status.pipeline.stages
    stages = (replace(first, ready=(peer_id(0),)), replace(middle, ready=(ME,)), last)
    return replace(
        status,
        model=replace(status.model, layers=middle.layers, roles=(Role.WORKER,)),
        stages=(replace(own_stage(middle), loss=None),),
        pipeline=PipelineStatus(stages),
    )


def gap() -> NodeStatus:
    """Nobody has the last of three stages yet, and somebody gets ready for it."""
    status = driver()
    assert status.pipeline is not None
    first, middle, last = status.pipeline.stages
    stages = (first, middle, replace(last, ready=(), joining=last.ready))
    missing = "Layers 9-12 are missing."
    return replace(
        status,
        state=NodeState.WAITING_FOR_STAGES,
        state_reason=missing,
        pipeline=PipelineStatus(stages, missing, PipelineFlow()),
    )


def resting() -> NodeStatus:
    """The only holder of the second stage is paused."""
    status = driver()
    assert status.pipeline is not None
    first, middle, last = status.pipeline.stages
    stages = (first, replace(middle, ready=(), paused=middle.ready), last)
    return replace(status, pipeline=replace(status.pipeline, stages=stages))


def one_stage() -> NodeStatus:
    """The whole model here, as on a lone node."""
    stages = (PipelineStage(0, LayerRange(0, 6), (ME,)),)
    return replace(
        snapshots.training(), stages=(own_stage(stages[0]),), pipeline=PipelineStatus(stages, "", flow(stages))
    )


def crowd() -> NodeStatus:
    """64 stages with 200 computers each."""
    return driver(holders(64, 200))


def silent() -> NodeStatus:
    """The only holder of the second stage has died, and nobody has noticed but this driver."""
    status = driver()
    assert status.pipeline is not None
    assert status.pipeline.flow is not None
    waiting = replace(status.pipeline.flow, unanswered=(1,))
    return replace(
        status,
        state=NodeState.WAITING_FOR_STAGES,
        state_reason="All nodes that hold a stage fail; this node tries them again.",
        pipeline=replace(status.pipeline, flow=waiting),
    )


def trainer() -> NodeStatus:
    """Drives the stages of others and holds none."""
    status = driver()
    assert status.pipeline is not None
    assert status.model is not None
    first, *others = status.pipeline.stages
    return replace(
        status,
        model=replace(status.model, layers=None),
        stages=(),
        pipeline=replace(status.pipeline, stages=(replace(first, ready=(peer_id(0),)), *others)),
    )
