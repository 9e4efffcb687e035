"""The relay at the observer of an organised run: nodes over loopback, which show it real admissions in handshakes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from neuroshard.config.settings import Settings
from neuroshard.identity.admissions import ADMISSION_SECONDS, AdmissionRevocation, sign_admission_revocation
from neuroshard.membership.run_members import Papers
from neuroshard.network.libp2p import libp2p_network
from neuroshard.network.libp2p import relay as relay_module
from neuroshard.node.peer_network import PeerNetwork, addresses_of
from tests.network.libp2p.test_libp2p_relay import FAR
from tests.node.test_closed_run import status
from tests.node.test_organised_run import AUTHORITY, OFFER, admission_of, members_at, refusal_at
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import run

OBSERVER, MEMBER, NEWCOMER = 5, 1, 2


@dataclass
class Relayed:
    """An observer that is a relay, and nodes that use relays as if loopback were the internet."""

    folder: Path
    tasks: Any

    async def observer(self) -> PeerNetwork:
        node = PeerNetwork.of(self._settings(OBSERVER), identity_of(OBSERVER), serves_others=True)
        self._start(node)
        admit(node, OBSERVER)
        await node.networking.up()
        return node

    def node(self, number: int, observer: PeerNetwork) -> PeerNetwork:
        me = identity_of(number)
        node = PeerNetwork.of(self._settings(number), me, lambda: libp2p_network(me, FAR))
        node.networking.book.add(addresses_of(observer.networking.current), is_given=True)
        self._start(node)
        return node

    def _settings(self, number: int) -> Settings:
        folder = self.folder / f"node-{number}"
        folder.mkdir()
        return Settings(data_dir=folder, p2p_host="127.0.0.1")

    def _start(self, node: PeerNetwork) -> None:
        node.join(OFFER, status, is_shared=True)
        self.tasks.start_soon(node.networking.run)


def play(folder: Path, scenario: Callable[[Relayed], Awaitable[None]]) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            await scenario(Relayed(folder, tasks))
            tasks.cancel_scope.cancel()

    run(main)


def admit(node: PeerNetwork, number: int) -> None:
    members_at(node).renew(admission_of(number, time.time()))


def has_place(node: PeerNetwork) -> bool:
    return any("/p2p-circuit/" in address for address in addresses_of(node.networking.current))


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "REFRESH_SECONDS", 1.0)


def test_a_node_has_a_place_at_the_relay_from_its_admission_on(tmp_path: Path) -> None:
    async def scenario(world: Relayed) -> None:
        observer = await world.observer()
        member, newcomer = (world.node(number, observer) for number in (MEMBER, NEWCOMER))
        admit(member, MEMBER)
        await until(lambda: has_place(member))
        await anyio.sleep(2 * relay_module.LOOK_SECONDS)  # the newcomer has asked, too
        assert refusal_at(observer, newcomer.identity.node_id)
        assert not has_place(newcomer)
        admit(newcomer, NEWCOMER)
        began = anyio.current_time()
        await until(lambda: has_place(newcomer))
        assert anyio.current_time() - began < 30

    play(tmp_path, scenario)


@pytest.mark.parametrize("how", ["expired", "revoked"])
def test_a_node_whose_admission_ends_loses_its_place_at_the_relay(tmp_path: Path, how: str) -> None:
    async def scenario(world: Relayed) -> None:
        observer = await world.observer()
        stays, goes = (world.node(number, observer) for number in (MEMBER, NEWCOMER))
        admit(stays, MEMBER)
        admit(goes, NEWCOMER)
        await until(lambda: has_place(stays) and has_place(goes))
        if how == "expired":
            # the organiser refreshes another node meanwhile, so there is no grace time
            for seconds in (ADMISSION_SECONDS / 2, ADMISSION_SECONDS + 60):
                later = time.time() + seconds
                members_at(observer).now = lambda later=later: later
                members_at(observer).learn(Papers(admissions=(admission_of(MEMBER, later),)))
        else:
            statement = AdmissionRevocation(OFFER.run_id, goes.identity.node_id, None, "proof", int(time.time()))
            ended = (sign_admission_revocation(AUTHORITY, statement),)
            members_at(observer).learn(Papers(ended=ended))
        await until(lambda: not has_place(goes))
        await until(lambda: has_place(stays))
        assert not has_place(goes)

    play(tmp_path, scenario)
