"""One member of certified rounds as a process of its own, over a real network at the address that it is given.

Says {"address", "node", "wallet"}; obeys JSON objects on stdin, one a line: {"peers": [...]} names the others and
connects to them, {"round": n, "codec": name, "strangers": bool, "audits": bool} takes part in a round of step n with a
vector of NUMBERS random numbers, and answers with its seconds, CPU seconds and bytes. Without audits it believes the
reducers, as the product never does. The end of stdin ends the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import Any
from unittest.mock import patch

import anyio
import anyio.to_thread
import torch

from benchmarks.identities import identity_of
from benchmarks.sizes import size
from neuroshard.aggregation import TrimmedMean
from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.all_reduce import AllReduce
from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.committee import Committee, GroupMember, Seat
from neuroshard.consensus.effects import AnyBody, Complete, EncodedContribution, RoundConfig, ViewTiming
from neuroshard.consensus.foundation import Founding, StageStart
from neuroshard.consensus.message_queue import PART, PART_LIMITS, PARTS_AT_ONCE
from neuroshard.consensus.round_messages import VerifiedBody, signed_by
from neuroshard.consensus.round_runner import RoundDependencies, RoundRunner
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import SlicePlan
from neuroshard.consensus.stage_chain import InMemoryChainStore, StageChain
from neuroshard.consensus.sync_strategies import Abandoned, StageRounds
from neuroshard.consensus.vote_log import FileVoteLog
from neuroshard.identity import NodeIdentity
from neuroshard.model.weights import TensorSchema
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.optim.outer import CertifiedWork
from neuroshard.state.download import ReplicaClient
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.transfer_messages import StageName
from neuroshard.types import LayerRange, NodeId, RunId, WalletId

NUMBERS = size(25_000_000, 25_000)
RUN = RunId("1" * 64)
STAGE = StageName(RUN, LayerRange(0, 1))
ROOT = "ab" * 32


class Peer:
    """Takes part in what it is told; a replica whose state the rounds do not change."""

    terms = StageRounds(RUN, 0, TensorSchema(("numbers",), ((NUMBERS,),)), OuterOptimization())
    stage = STAGE
    may_meet, saved_outer_step = True, 0
    must_hold = copy_keeper = word = None
    restarting = 0
    changes = ()

    def __init__(self, identity: NodeIdentity, network: Network, folder: Path) -> None:
        self._identity = identity
        self._network = network
        self._members = [GroupMember(identity.node_id, identity.wallet_id)]
        self._plan = SlicePlan(NUMBERS)
        self._vector = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(sum(map(ord, identity.node_id))))
        self.member = self._members[0]
        self.outer = self.vote = self.control = self.keeper = self
        around = RoundDependencies(
            self,
            ReplicaClient(network.transport),
            FileVoteLog(folder / identity.node_id),
            StageChain(lambda: None, InMemoryChainStore()),
        )
        self.actor = RoundRunner(self, around, lambda _message: None)
        network.transport.serve(PART, self.actor.mail.take, PART_LIMITS, max_concurrent=PARTS_AT_ONCE)

    async def meet(self, peers: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Connect to the others."""
        for peer in peers:
            self._members.append(GroupMember(peer["node"], peer["wallet"]))
            await self._network.transport.connect(peer["address"], is_given=True)
        return {"members": len(self._members)}

    async def round(self, number: int, codec: str, *, are_strangers: bool) -> Mapping[str, Any]:
        """One round of all members."""
        step = self._step(number, codec, are_strangers=are_strangers)
        work = RoundWork(self._plan, make_codec(codec), TrimmedMean(0.1))  # type: ignore[arg-type]
        expected = frozenset(member.node_id for member in self._members)
        me = GroupMember(self._identity.node_id, self._identity.wallet_id)
        fits = partial(work.is_slice, work.codec), partial(work.is_slice, work.results)
        setting = RoundConfig(
            *(step, self._plan, me, expected, self.sign, *fits, ViewTiming(60, 120, 240)),
            secret=token_bytes(32),
            excerpts=work.excerpts,
        )
        moved, cpu, start = self._moved(), time.process_time(), time.perf_counter()
        parts = await anyio.to_thread.run_sync(work.encoded, self._vector)
        contribution = EncodedContribution(parts, 100, 1_000_000, seconds=60, made_at=int(1000 * time.time()))
        await anyio.to_thread.run_sync(lambda: contribution.digests)
        self.actor.enter(setting, number, work, contribution)
        outcome = await self.actor.outcome()
        if not isinstance(outcome, Complete):
            raise SystemExit(outcome)
        if outcome.vector is None:
            await anyio.to_thread.run_sync(work.decoded, outcome.aggregate)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "cpu": time.process_time() - cpu,
            "bytes": self._moved() - moved,
            "value": outcome.certificate.value.digest,
            "encoded": sum(map(len, parts)),
        }

    def _step(self, number: int, codec: str, *, are_strangers: bool) -> Step:
        """A step in which each member has a seat. All steps follow the foundation: none of them is applied."""
        members = sorted(self._members)
        committee = Committee.founded([Seat(one.wallet_id, one.node_id, 0) for one in members], is_open=are_strangers)
        owner = members[0].wallet_id
        chain = Chain.founded(Founding("f" * 64, 0, StageStart(0, committee), owner))
        return Step(RUN, 0, number, ROOT, codec, chain.standing, chain.ledger, owner)

    def _moved(self) -> int:
        return sum(one.bytes_sent for one in self._network.transport.connections())

    # What matchmaking would ask for is never asked

    def own_status(self) -> ReplicaStatus:
        raise NotImplementedError

    def replicas(self, stage: int) -> Sequence[NodeId]:
        raise NotImplementedError

    def newcomers(self) -> frozenset[NodeId]:
        raise NotImplementedError

    def wallet_of(self, node_id: NodeId) -> WalletId | None:
        raise NotImplementedError

    def is_removed(self, wallet: WalletId) -> bool:
        raise NotImplementedError

    @property
    def revoked(self) -> frozenset[tuple[WalletId, NodeId]]:
        return frozenset()

    def sequences_due(self, members: int) -> int:
        raise NotImplementedError

    def note_abandoned(self, outcome: Abandoned) -> None:
        raise NotImplementedError

    # What a round asks for

    def sign(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        return signed_by(self._identity, body, time.time())

    def measured_candidates(self) -> int:
        return 1

    async def root_after(self, aggregate: torch.Tensor, outer_step: int, work: CertifiedWork) -> str:
        """Some numbers stand for the root: what the outer step costs is no part of a round's comparison."""
        await anyio.lowlevel.checkpoint()
        return sha256(aggregate[:64].numpy().tobytes()).hexdigest()

    async def objection(self, aggregate: torch.Tensor, next_root: str, choice: int | None = None) -> str:
        await anyio.lowlevel.checkpoint()
        return ""

    async def choice(self, aggregate: torch.Tensor) -> int:
        raise NotImplementedError


async def main() -> None:
    """See above."""
    number, folder, host = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    identity = identity_of(number)
    options = NetworkOptions(host, lan_discovery=False, port_mapping=False, relay=False)
    async with libp2p_network(identity, options) as network, anyio.create_task_group() as tasks:
        peer = Peer(identity, network, folder)
        await peer.actor.load()
        tasks.start_soon(peer.actor.run)
        address = network.transport.addresses()[0]
        _tell({"address": address, "node": identity.node_id, "wallet": identity.wallet_id})
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            match json.loads(line):
                case {"peers": peers}:
                    _tell(await peer.meet(peers))
                case {"round": int(step), "codec": str(codec), "strangers": bool(strangers), "audits": bool(audits)}:
                    with nullcontext() if audits else _without_audits():
                        _tell(await peer.round(step, codec, are_strangers=strangers))
                case order:
                    raise SystemExit(f"unknown order {order}")
        tasks.cancel_scope.cancel()


@contextmanager
def _without_audits() -> Generator[None]:
    """Let no seat compute a slice again, and no contributor its norms."""
    with (
        patch.object(AllReduce, "audit", lambda _exchange: []),
        patch.object(RoundWork, "norms_compared", lambda _work, _job: frozenset()),
    ):
        yield


def _tell(facts: Mapping[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    anyio.run(main, backend="trio")
