"""Nodes that only meet: real networks over loopback without training, in a process of their own.

`python -m benchmarks.peer_network_process --nodes 50 [--peer ADDRESS]` prints the address of the first and one line for
every question on standard input: "seen" (how many peers each node knows, the least), "knows ID" (how many nodes know
this one), "found ID" (whether it stands in the directory), "use" (CPU seconds of this process, bytes sent and received
by the first node). It ends with standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from benchmarks.friends import befriend
from benchmarks.identities import identity_of
from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.config.settings import Settings
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet, read_claim
from neuroshard.membership.announcements import directory_namespace
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.runs.offer import RunOffer
from neuroshard.status.snapshot import ModelStatus, NodeState, NodeStatus, TrainingStatus
from neuroshard.types import Architecture, LayerRange

SHAPE = Architecture(64, 2, 2, 1, 128, 512, 32)
PARAMETERS = RunParameters("meeting", 1, SHAPE, 1, 4, 8, 7, GenesisPins("ab" * 32, 16, None, "ef" * 32, 512))
OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
OFFER = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, PARAMETERS))
LAYERS = LayerRange(0, 2)
NAMESPACE = directory_namespace(OFFER.run_id)
STARTED_AT = time.time()  # as of a real node, always the same


@dataclass(frozen=True)
class Crowd:
    """Nodes of one process."""

    peer_networks: tuple[PeerNetwork, ...]

    def least_seen(self) -> int:
        """How many peers the node knows that knows the fewest."""
        return min(len(peer_network.look().peers) for peer_network in self.peer_networks)

    async def finds(self, node_id: str) -> int:
        """1 when the second node finds this one in the directory, which it must ask others for."""
        network = self.peer_networks[1].networking.current
        records = () if network is None else await network.directory.find(NAMESPACE)
        return int(any(read_claim(record, object).delegation.node_id == node_id for record in records))

    def knows(self, node_id: str) -> int:
        """How many of the nodes know this one."""
        return sum(
            any(peer.node_id == node_id for peer in peer_network.look().peers) for peer_network in self.peer_networks
        )


def status() -> NodeStatus:
    """What a node says of itself here."""
    model = ModelStatus(SHAPE, 1000, LAYERS, LAYERS.roles(2))
    training = TrainingStatus(steps=10, tokens=1000, loss_ema=4.0, tokens_per_second=100.0)
    return NodeStatus("0", STARTED_AT, time.time(), NodeState.TRAINING, "Training.", model=model, training=training)


def peer_network(folder: Path, number: int, peers: Sequence[str]) -> PeerNetwork:
    """Node number 1 to 255."""
    settings = Settings(data_dir=folder / str(number), p2p_host="127.0.0.1", peer=tuple(peers))
    identity = identity_of(number)
    settings.data_dir.mkdir()
    befriend(settings.data_dir, OFFER, identity.delegation.grant.wallet_public_key, OWNER)
    made = PeerNetwork.of(settings, identity)
    made.serve(OFFER, status, is_shared=True)
    return made


async def main(first: int, count: int, peers: list[str]) -> None:
    """Run the nodes until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        async with anyio.create_task_group() as tasks:
            known = list(peers)
            made: list[PeerNetwork] = []
            for number in range(first, first + count):
                made.append(peer_network(Path(folder), number, known))
                tasks.start_soon(made[-1].networking.run)
                network = await made[-1].networking.up()
                if not known:
                    known = [network.transport.addresses()[0]]
                if number == first:
                    tell({"address": network.transport.addresses()[0], "cpu": time.process_time()})
            await answer(Crowd(tuple(made)))
            tasks.cancel_scope.cancel()


async def answer(crowd: Crowd) -> None:
    """One line for each line."""
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        word, _, rest = line.strip().partition(" ")
        match word:
            case "seen":
                tell({"count": crowd.least_seen()})
            case "knows":
                tell({"count": crowd.knows(rest)})
            case "found":
                tell({"count": await crowd.finds(rest)})
            case _:
                network = crowd.peer_networks[0].look().network
                tell({"cpu": time.process_time(), "sent": network.bytes_sent, "received": network.bytes_received})


def tell(value: dict[str, object]) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--peer", action="append", default=[])
    given = parser.parse_args()
    anyio.run(main, given.first, given.nodes, given.peer, backend="trio")
