"""A newcomer among names that cost nothing: it finds the certified state, whatever they say and however they sort."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from msgspec import structs

from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.chain import Chain, ChainProof
from neuroshard.identity import SignedRunParameters
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.reports import TrainingReport
from neuroshard.messages import Frame
from neuroshard.runs.offer import RunOffer
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.transfer_messages import MANIFEST, MANIFEST_REQUEST
from neuroshard.types import NodeId
from tests.worlds.free_names import FreeName, invented
from tests.worlds.lone_chains import certified_lone_steps, show_chain
from tests.worlds.nodes import (
    EPOCH,
    OWNER,
    PINS,
    REPORT_SECONDS,
    SHAPE,
    StageNode,
    StageWorld,
    living,
    now,
    play,
    root_on_disk,
)
from tests.worlds.replicas import wallet_of

NAMES = [NodeId(f"12D3KooW0 free {number:02d}") for number in range(24)]  # digits sort before all ids of nodes


def surround(world: StageWorld, newcomer: StageNode, holder: StageNode, chain: Chain, root: str) -> None:
    """The names report that they hold the stage. They claim the certified state, an invented one, or the first one."""
    proofs: list[ChainProof | bytes | None] = [ChainProof(chain.ledger, None), invented(chain.proof(0)), b"none", None]

    async def keep_silent(_sender: NodeId, _frame: Frame) -> Frame:
        await anyio.sleep_forever()
        raise AssertionError

    for number, name in enumerate(NAMES):
        claimed = (1, root) if number % 3 == 0 else (0, "0" * 64) if number % 3 == 1 else (10**6, "e" * 64)
        status = ReplicaStatus(True, 10**9, *claimed, is_certified=True, height=10**9, wallet_rounds=10**9)
        proof = proofs[number % len(proofs)]
        FreeName(name, world.network, lambda status=status: status, lambda proof=proof: proof)
        if number % 2:
            transport = world.network.network_of(name).transport
            transport.serve(MANIFEST, keep_silent, MANIFEST_REQUEST)
        report = structs.replace(holder.own_report(), steps=10**9, sequence=0)
        address = Announcement(
            world.offer.run_id, 1, report.layers, None, EPOCH, 500, False, "1", addresses=(f"/memory/p2p/{name}",)
        )
        newcomer.membership.hear_announcement(Statement(name, wallet_of(name), now(), now() + 1e6, address))
        world.tasks.start_soon(keep_reporting, newcomer, name, report)


async def keep_reporting(newcomer: StageNode, name: NodeId, report: TrainingReport) -> None:
    for sequence in count(1):
        said = structs.replace(report, sequence=sequence)
        newcomer.membership.hear_report(Statement(name, wallet_of(name), now(), now() + 1e6, said), now())
        await anyio.sleep(REPORT_SECONDS)


@pytest.mark.parametrize("admission", ["friends", "strangers"])
def test_a_newcomer_finds_the_certified_state_between_names_that_sort_first(admission: str, tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        parameters = RunParameters("test", 1, SHAPE, 3, 1, 4, 7, PINS, admission=cast("Any", admission))
        world.offer = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, parameters))
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(30)
            holder = nodes[0]
            assert holder.stage is not None
            holder.stage.outer_step = 1
            holder.stage.save()
            root = root_on_disk(holder.stage)
            holder.stage.replica_status = lambda: ReplicaStatus(True, 30, 1, root, height=1)  # type: ignore[method-assign]
            statement, (chain,) = certified_lone_steps(world, holder, [root], is_open=admission == "strangers")
            show_chain(holder, lambda: chain)
            newcomer = world.add()
            versions = newcomer.swarm.versions
            versions.learn_foundations(versions.foundations.with_statements([statement]))
            surround(world, newcomer, holder, chain, root)
            world.tasks.start_soon(lambda: newcomer.live(0, moves=False))
            with anyio.fail_after(120):
                while newcomer.stage is None:
                    await anyio.sleep(1)
            assert newcomer.stage.outer_step == 1
            assert root_on_disk(newcomer.stage) == root
            assert holder.name not in {blamed for blamed, _ in newcomer.blamed}

    play(tmp_path, scenario)
