"""Which nodes hold which stages, as a node tells it from its own state and the others' reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
import trio
from trio.testing import MockClock

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, SignedRunParameters, TokenSecret, Wallet
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.membership.swarm_view import Membership
from neuroshard.model.architecture import StagePlan
from neuroshard.model.transformer import StageModel
from neuroshard.network import InMemoryNetwork
from neuroshard.node.pipeline_status import LOOK_SECONDS, Holding, pipeline_stages, pipeline_status, publish_stages
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.offer import RunOffer
from neuroshard.status.board import Publisher, StatusBoard
from neuroshard.status.pipeline import PipelineFlow
from neuroshard.status.snapshot import ModelStatus, NodeState, NodeStatus
from neuroshard.types import Architecture, LayerRange, NodeId, WalletId

NOW = 1_700_000_000.0
SHAPE = Architecture(16, 6, 2, 1, 32, 64, 8)
PARAMETERS = RunParameters("test", 1, SHAPE, 3, 1, 4, 7, GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 64))
PLAN = StagePlan.even(6, 3)
OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
A, B, C, D = (NodeId(name) for name in "abcd")


def holding(node: NodeId, start: int, stop: int, state: NodeState = NodeState.TRAINING) -> Holding:
    return Holding(node, StageRange(start, stop), state)


def test_a_stage_that_nobody_holds_is_there_too() -> None:
    first, second, third = pipeline_stages(PLAN, [holding(A, 0, 1), holding(B, 0, 2)])
    assert (first.index, first.layers, first.ready) == (0, LayerRange(0, 2), (A, B))
    assert not first.is_missing
    assert not first.has_single_holder
    assert (second.layers, second.ready, second.has_single_holder) == (LayerRange(2, 4), (B,), True)
    assert (third.layers, third.ready, third.is_missing) == (LayerRange(4, 6), (), True)
    assert not third.has_single_holder


@pytest.mark.parametrize(
    ("state", "place"),
    [
        (NodeState.TRAINING, "ready"),
        (NodeState.WAITING_FOR_DATA, "ready"),
        (NodeState.WAITING_FOR_STAGES, "ready"),
        (NodeState.PAUSED, "paused"),
        (NodeState.STARTING, "joining"),
        (NodeState.STOPPING, None),
        (NodeState.FAILED, None),
        (NodeState.NOT_TRAINING, None),
    ],
)
def test_what_a_node_does_decides_where_it_stands(state: NodeState, place: str | None) -> None:
    stage = pipeline_stages(PLAN, [holding(A, 0, 1, state)])[0]
    found = {name for name in ("ready", "paused", "joining") if getattr(stage, name)}
    assert found == ({place} if place else set())
    assert stage.is_missing == (place in ("joining", None))
    assert stage.is_resting == (place == "paused")
    assert stage.has_single_holder == (not stage.is_missing)
    assert stage.holders == ((A,) if place else ())


def report(layers: LayerRange | None, state: NodeState) -> TrainingReport:
    return TrainingReport(
        run_id=OFFER.run_id,
        sequence=1,
        steps=1,
        tokens=1,
        loss_ema=None,
        shard=None,
        shards_seen=0,
        roles=() if layers is None else layers.roles(6),
        layers=layers,
        outer_step=0,
        state_hash="",
        successful_syncs=0,
        failed_syncs=0,
        tokens_per_second=1.0,
        state=state,
        started_at=NOW,
        interval_seconds=10.0,
    )


OFFER = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, PARAMETERS))


@pytest.fixture
def service() -> Iterator[StageServer]:
    """Of the middle stage."""
    compute = ComputeThread(cpu_threads=1)
    model = StageModel(SHAPE, LayerRange(2, 4))
    executor = StageExecutor(model, make_inner_optimizer(model, PARAMETERS.inner), torch.device("cpu"))
    yield StageServer(compute, executor, sequences_per_step=4, batch_size=1)
    compute.close()


@pytest.fixture
def swarm(tmp_path: Path) -> StageSwarm:
    """Of a node that has heard of four others."""
    key = NodeKey.from_seed(bytes([7]) * 32)
    identity = NodeIdentity(
        OWNER.wallet_id, key.node_id, key, Delegation.issue(OWNER, key.public_key, expires_at=NOW + 1e6)
    )
    membership = Membership(identity.node_id, identity.wallet_id)
    said = {
        A: report(LayerRange(0, 2), NodeState.TRAINING),
        B: report(LayerRange(2, 6), NodeState.STARTING),
        C: report(LayerRange(1, 3), NodeState.TRAINING),  # no stages of this plan
        D: report(None, NodeState.TRAINING),
    }
    for node, value in said.items():
        membership.hear_report(Statement(node, WalletId("w"), NOW, NOW + 1e6, value), NOW)
    membership.count_own_report(report(LayerRange(4, 6), NodeState.TRAINING), b"", NOW)  # of some seconds ago
    networking = Networking(identity.node_id, None, peers_file=tmp_path / "peers", given=(), loopback_only=True)
    return StageSwarm(identity, RunVersions(OFFER), membership, networking)


def test_this_node_is_told_as_it_is_now_and_the_others_as_they_reported(
    swarm: StageSwarm, service: StageServer
) -> None:
    me = swarm.node_id
    none_held = pipeline_status(swarm, NodeState.STARTING, None)
    assert [stage.ready for stage in none_held.stages] == [(A,), (), ()]
    swarm.hold(1, service, lambda: "", lambda: 0)
    flow = PipelineFlow(microbatches=3)
    found = pipeline_status(swarm, NodeState.TRAINING, flow)
    assert found.flow is flow
    assert [(stage.ready, stage.joining) for stage in found.stages] == [((A,), ()), ((me,), (B,)), ((), (B,))]
    assert found.missing == "Layers 5-6 are missing." == swarm.missing()
    assert pipeline_status(swarm, NodeState.STARTING, None).stages[1].ready == (me,)
    paused = pipeline_status(swarm, NodeState.PAUSED, None)
    assert [(stage.ready, stage.paused) for stage in paused.stages] == [((A,), ()), ((), (me,)), ((), ())]
    assert pipeline_status(swarm, NodeState.STOPPING, None).stages[1].ready == ()


def test_a_node_that_gets_ready_stands_where_it_is_going(swarm: StageSwarm, service: StageServer) -> None:
    coming = pipeline_status(swarm, NodeState.STARTING, wanted=LayerRange(4, 6))
    assert [stage.joining for stage in coming.stages] == [(), (B,), (swarm.node_id, B)]
    assert coming.missing == "Layers 3-6 are missing."
    swarm.hold(1, service, lambda: "", lambda: 0)
    at_hand = pipeline_status(swarm, NodeState.TRAINING, wanted=LayerRange(4, 6))
    assert [stage.ready for stage in at_hand.stages] == [(A,), (swarm.node_id,), ()]
    swarm.release()
    no_stages = pipeline_status(swarm, NodeState.STARTING, wanted=LayerRange(1, 2))
    assert swarm.node_id not in {holder for stage in no_stages.stages for holder in stage.holders}


def test_while_a_node_gets_ready_the_stages_are_told(swarm: StageSwarm) -> None:
    model = ModelStatus(SHAPE, 1000, LayerRange(4, 6), ())
    board = StatusBoard(NodeStatus("1", NOW, NOW, node_id=swarm.node_id, model=model))
    publisher = Publisher(board)

    async def main() -> None:
        with InMemoryNetwork() as network:
            network.join(swarm.node_id)
            there = network.network_of(swarm.node_id)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish_stages, swarm, publisher, board.current, there)
                await anyio.sleep(LOOK_SECONDS + 0.5)
                told = board.current().pipeline
                assert told is not None
                assert told.stages[2].joining == (swarm.node_id, B)
                publisher.change(state=NodeState.TRAINING, pipeline=None)
                await anyio.sleep(5 * LOOK_SECONDS)
                assert board.current().pipeline is None
                tasks.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
