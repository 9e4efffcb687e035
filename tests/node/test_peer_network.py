"""Several nodes' dealings with each other, over the in-memory network and under a virtual clock."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import trio
from trio.testing import MockClock

from benchmarks.friends import befriend
from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.config.settings import Settings
from neuroshard.errors import NetworkRefusedError, UsageError
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.network import InMemoryNetwork, Network
from neuroshard.network.mdns import RunNotice
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.nat.port_mapping import PortMapping, SecondRouterError
from neuroshard.network.nat.router import Router
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.status.computer import MemoryStatus
from neuroshard.status.snapshot import ModelStatus, NetworkState, NodeState, NodeStatus, TrainingStatus
from neuroshard.types import Architecture, LayerRange
from tests.worlds.claims import identity_of
from tests.worlds.clock import at_once

START = 1_700_000_000.0
OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
SHAPE = Architecture(64, 2, 2, 1, 128, 512, 32)
PARAMETERS = RunParameters("test", 1, SHAPE, 1, 4, 8, 7, GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512))
OFFER = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, PARAMETERS))
LAYERS = LayerRange(0, 2)
GENESIS = "https://data.example"


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def now() -> float:
    return START + anyio.current_time()


def status(number: int) -> NodeStatus:
    model = ModelStatus(SHAPE, 1000, LAYERS, LAYERS.roles(2))
    training = TrainingStatus(steps=10 * number, tokens=1000, loss_ema=4.0 + number, tokens_per_second=100.0)
    memory = MemoryStatus(500, 600, "--memory", 400, 300, 350)
    state = NodeState.TRAINING
    return NodeStatus("1.2.3", START, START, state, "Training.", model=model, training=training, memory=memory)


@dataclass
class World:
    """Nodes on one in-memory network; each has a data folder of its own."""

    folder: Path
    network: InMemoryNetwork

    def peer_network(self, number: int, **settings: Any) -> PeerNetwork:
        me = identity_of(number)

        @asynccontextmanager
        async def opened() -> AsyncGenerator[Network]:
            self.network.join(me.node_id)
            try:
                yield self.network.network_of(me.node_id)
            finally:
                self.network.kill(me.node_id)

        chosen = Settings(data_dir=self.folder / f"node-{number}", p2p_host="127.0.0.1", genesis=GENESIS, **settings)
        chosen.data_dir.mkdir(parents=True, exist_ok=True)
        befriend(chosen.data_dir, OFFER, me.delegation.grant.wallet_public_key, OWNER)
        return PeerNetwork.of(chosen, me, opened, now, offload=at_once)


def serving(peer_network: PeerNetwork, number: int, *, is_shared: bool = True) -> PeerNetwork:
    peer_network.serve(OFFER, lambda: status(number), is_shared=is_shared)
    return peer_network


async def until(seconds: float, holds: Callable[[], bool]) -> None:
    """Wait until something holds, at most so many virtual seconds."""
    with anyio.fail_after(seconds):
        while not holds():
            await anyio.sleep(0.1)


def peers(peer_network: PeerNetwork) -> set[str]:
    return {peer.node_id for peer in peer_network.look().peers}


def test_nodes_of_a_run_know_each_other_at_once_and_miss_who_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            world = World(tmp_path, network)
            peer_networks = [serving(world.peer_network(number), number) for number in range(5)]
            async with anyio.create_task_group() as tasks:
                for peer_network in peer_networks[:-1]:
                    tasks.start_soon(peer_network.networking.run)
                with anyio.CancelScope() as life_of_last:
                    async with anyio.create_task_group() as last:
                        last.start_soon(peer_networks[-1].networking.run)
                        await until(3, lambda: all(len(peers(peer_network)) == 4 for peer_network in peer_networks))
                        seen = peer_networks[0].look()
                        life_of_last.cancel()
                assert seen.swarm is not None
                assert (seen.swarm.nodes, seen.swarm.training_nodes, seen.swarm.total_steps) == (5, 5, 100)
                assert seen.swarm.global_loss == pytest.approx(6.0)
                assert {peer.version for peer in seen.peers} == {"1.2.3"}
                assert seen.network.state is NetworkState.CONNECTED
                await until(3, lambda: all(len(peers(peer_network)) == 3 for peer_network in peer_networks[:-1]))
                after = peer_networks[0].look().swarm
                assert after is not None
                assert (after.nodes, after.total_steps) == (4, 100)  # what it did still counts
                tasks.cancel_scope.cancel()

    virtual(main)


def test_who_dies_without_a_word_is_missed_within_fifteen_seconds(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            world = World(tmp_path, network)
            peer_networks = [serving(world.peer_network(number), number) for number in range(4)]
            async with anyio.create_task_group() as tasks:
                for peer_network in peer_networks[:-1]:
                    tasks.start_soon(peer_network.networking.run)
                with anyio.CancelScope() as life_of_last:
                    async with anyio.create_task_group() as last:
                        last.start_soon(peer_networks[-1].networking.run)
                        await until(3, lambda: all(len(peers(peer_network)) == 3 for peer_network in peer_networks))
                        await anyio.sleep(20)
                        dead = identity_of(3).node_id
                        network.partition({dead}, {identity_of(number).node_id for number in range(3)})
                        life_of_last.cancel()  # nobody hears its good-bye
                await until(
                    15,
                    lambda: all(
                        peers(peer_network) == peers(peer_network) - {dead} for peer_network in peer_networks[:-1]
                    ),
                )
                swarm = peer_networks[0].look().swarm
                assert swarm is not None
                assert (swarm.nodes, swarm.total_steps) == (3, 60)  # what it did still counts
                await anyio.sleep(60)
                assert all(len(peers(peer_network)) == 2 for peer_network in peer_networks[:-1])
                tasks.cancel_scope.cancel()

    virtual(main)


def test_a_lost_connection_alone_makes_nobody_a_dead_one(tmp_path: Path) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            world = World(tmp_path, network)
            peer_networks = [serving(world.peer_network(number), number) for number in range(3)]
            async with anyio.create_task_group() as tasks:
                for peer_network in peer_networks:
                    tasks.start_soon(peer_network.networking.run)
                await until(3, lambda: all(len(peers(peer_network)) == 2 for peer_network in peer_networks))
                for _ in range(5):
                    network.partition({identity_of(0).node_id}, {identity_of(1).node_id})
                    await anyio.sleep(2)
                    network.partition()
                    for _ in range(20):
                        assert all(len(peers(peer_network)) == 2 for peer_network in peer_networks)
                        await anyio.sleep(1)
                tasks.cancel_scope.cancel()

    virtual(main)


def test_a_partition_of_an_hour_heals(tmp_path: Path) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            world = World(tmp_path, network)
            peer_networks = [serving(world.peer_network(number), number) for number in range(4)]
            async with anyio.create_task_group() as tasks:
                for peer_network in peer_networks:
                    tasks.start_soon(peer_network.networking.run)
                await until(3, lambda: all(len(peers(peer_network)) == 3 for peer_network in peer_networks))
                ids = [peer_network.identity.node_id for peer_network in peer_networks]
                network.partition(ids[:2], ids[2:])
                await until(120, lambda: all(len(peers(peer_network)) == 1 for peer_network in peer_networks))
                await anyio.sleep(3600)
                assert all(len(peers(peer_network)) == 1 for peer_network in peer_networks)
                network.partition()
                await until(30, lambda: all(len(peers(peer_network)) == 3 for peer_network in peer_networks))
                tasks.cancel_scope.cancel()

    virtual(main)


def test_a_newcomer_gets_a_run_by_its_id_and_keeps_it(tmp_path: Path) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            world = World(tmp_path, network)
            first = serving(world.peer_network(0), 0, is_shared=False)
            newcomer = world.peer_network(1, run=OFFER.run_id)
            told: list[str] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(newcomer.networking.run)
                tasks.start_soon(first.networking.run)
                found = await newcomer.finder.first(told.append)
                tasks.cancel_scope.cancel()
            assert found is not None
            assert found.offer == OFFER
            assert JoinedRuns(newcomer.settings.data_dir).load(OFFER.run_id) == OFFER

            again = world.peer_network(1, run=OFFER.run_id, network=False)
            kept = await again.finder.first(told.append)
            assert kept is not None
            assert kept.offer == OFFER

    virtual(main)


def test_waiting_for_a_run_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            newcomer = World(tmp_path, network).peer_network(1, run=OFFER.run_id)
            told: list[str] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(newcomer.networking.run)
                with anyio.move_on_after(5):
                    await newcomer.finder.first(told.append)
                tasks.cancel_scope.cancel()
            assert OFFER.run_id[:16] in told[-1]

    virtual(main)


def test_a_router_behind_another_one_is_told_in_the_status(tmp_path: Path) -> None:
    async def find() -> Router:
        await anyio.lowlevel.checkpoint()
        raise SecondRouterError("The router is itself behind another one.")

    async def main() -> None:
        with InMemoryNetwork() as network:
            ports = ExternalAddresses()
            mapping = PortMapping(ports, (find,))
            peer_network = replace(World(tmp_path, network).peer_network(0), port_mapping=mapping)
            peer_network.networking.attach(mapping.live)
            async with anyio.create_task_group() as tasks:
                with ports.listening(lambda: ("192.168.1.5",), (4001,)):
                    tasks.start_soon(peer_network.networking.run)
                    await until(3, lambda: "behind another one" in peer_network.look().network.explanation)
                    tasks.cancel_scope.cancel()
            assert "behind another one" not in peer_network.look().network.explanation

    virtual(main)


def test_only_a_shared_run_is_told_to_those_who_ask_for_any(tmp_path: Path) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            world = World(tmp_path, network)
            private = serving(world.peer_network(0), 0, is_shared=False)
            curious = world.peer_network(1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(private.networking.run)
                tasks.start_soon(curious.networking.run)
                assert await curious.exchange.hear_of_any(curious.networking, seconds=3) is None
                tasks.start_soon(serving(world.peer_network(2), 2).networking.run)
                assert await curious.exchange.hear_of_any(curious.networking, seconds=3) == OFFER
                tasks.cancel_scope.cancel()

    virtual(main)


def test_a_network_that_cannot_open_is_told_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        with InMemoryNetwork() as network:
            me, tries = identity_of(0), 0

            @asynccontextmanager
            async def opened() -> AsyncGenerator[Network]:
                nonlocal tries
                tries += 1
                if tries < 4:
                    raise NetworkRefusedError("Port 4001 is in use.", "Choose another --p2p-port.")
                network.join(me.node_id)
                yield network.network_of(me.node_id)

            settings = Settings(data_dir=tmp_path, p2p_host="127.0.0.1")
            peer_network = PeerNetwork.of(settings, me, opened, now, offload=at_once)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(peer_network.networking.run)
                await anyio.sleep(0.5)
                seen = peer_network.look().network
                assert seen.state is NetworkState.FAILED
                assert "Port 4001 is in use" in seen.explanation
                assert "Training continues" in seen.explanation
                await until(30, lambda: peer_network.look().network.state is NetworkState.ALONE)
                tasks.cancel_scope.cancel()
            assert tries == 4

    virtual(main)


def test_without_a_network_nothing_runs_and_an_unknown_run_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            peer_network = World(tmp_path, network).peer_network(0, network=False, run=OFFER.run_id)
            await peer_network.networking.run()
            assert peer_network.look().network.state is NetworkState.OFF
            with pytest.raises(UsageError, match="no-network"):
                await peer_network.finder.first(lambda _: None)

    virtual(main)


@pytest.mark.parametrize("network", [True, False])
def test_a_lone_node_counts_itself_with_its_present_values(tmp_path: Path, network: bool) -> None:
    """Also without a network, in which no report is made, and at once after a change, before the next report."""
    seen = status(1)

    async def main() -> None:
        with InMemoryNetwork() as memory:
            peer_network = World(tmp_path, memory).peer_network(0, network=network)
            nonlocal seen
            peer_network.serve(OFFER, lambda: seen, is_shared=False)
            totals = peer_network.look().swarm
            assert totals is not None
            assert (totals.nodes, totals.training_nodes, totals.total_steps) == (1, 1, seen.training.steps)
            assert totals.tokens_per_second == seen.training.tokens_per_second > 0
            seen = replace(seen, state=NodeState.PAUSED)
            totals = peer_network.look().swarm
            assert totals is not None
            assert (totals.training_nodes, totals.tokens_per_second) == (0, 0.0)

    virtual(main)


def known_version(peer_network: PeerNetwork) -> int:
    assert peer_network.exchange.followed is not None
    return peer_network.exchange.followed.offer.parameters.version


def test_a_newcomer_gets_every_version_for_the_chain(tmp_path: Path) -> None:
    offer = OFFER
    for number, start in ((2, 10), (3, 20)):
        parameters = replace(
            PARAMETERS,
            version=number,
            holds_from_outer_step=start,
            outer=replace(PARAMETERS.outer, learning_rate=0.7 - 0.1 * number),
        )
        offer = offer.with_version(SignedRunParameters.sign(OWNER, parameters))

    async def main() -> None:
        with InMemoryNetwork() as network:
            world = World(tmp_path, network)
            old = world.peer_network(0)
            old.serve(offer, lambda: status(0), is_shared=True)
            newcomer = world.peer_network(1, run=OFFER.run_id)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(old.networking.run)
                tasks.start_soon(newcomer.networking.run)
                with anyio.fail_after(30):
                    found = await newcomer.finder.first(lambda _: None)
                tasks.cancel_scope.cancel()
            assert found is not None
            assert found.offer == offer
            swarm = newcomer.serve(found.offer, lambda: status(1), is_shared=True)
            assert [(change.number, change.holds_from) for change in swarm.changes] == [(2, 10), (3, 20)]

    virtual(main)


def test_a_newer_version_of_the_run_arrives_by_itself(tmp_path: Path) -> None:
    newer = replace(PARAMETERS, version=2, outer=replace(PARAMETERS.outer, learning_rate=0.5))
    changed = RunOffer(OFFER.initial, SignedRunParameters.sign(OWNER, newer))

    async def main() -> None:
        with InMemoryNetwork() as network:
            world = World(tmp_path, network)
            old = serving(world.peer_network(0), 0)
            ahead = world.peer_network(1)
            ahead.serve(changed, lambda: status(1), is_shared=True)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(old.networking.run)
                tasks.start_soon(ahead.networking.run)
                await until(20, lambda: known_version(old) == 2)  # soon after they met
                newest = changed.with_version(SignedRunParameters.sign(OWNER, replace(newer, version=3)))
                JoinedRuns(ahead.settings.data_dir).keep(newest)  # as `run create --update` does beside the node
                tasks.start_soon(ahead.exchange.watch_stored)
                await until(20, lambda: known_version(ahead) == 3)
                await until(400, lambda: known_version(old) == 3)
                tasks.cancel_scope.cancel()
            kept = JoinedRuns(old.settings.data_dir).load(OFFER.run_id)
            assert kept is not None
            assert kept.parameters.version == 3

    virtual(main)


@pytest.mark.parametrize(
    ("admission", "is_shared", "is_announced"),
    [("strangers", True, True), ("strangers", False, False), ("friends", True, False)],
)
def test_a_run_is_announced_only_where_this_node_can_let_others_in(
    tmp_path: Path, admission: Literal["friends", "strangers"], is_shared: bool, is_announced: bool
) -> None:
    """In a run of friends only the owner's node opens the door; this one is a guest's."""
    offer = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, replace(PARAMETERS, admission=admission)))

    async def main() -> None:
        with InMemoryNetwork() as network:
            peer_network = World(tmp_path, network).peer_network(0)
            assert peer_network.notice() is None  # before it knows its run
            peer_network.serve(offer, lambda: status(0), is_shared=is_shared)
            assert peer_network.notice() == (RunNotice(offer.run_id, "test", 1) if is_announced else None)

    virtual(main)
