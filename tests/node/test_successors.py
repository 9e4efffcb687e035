"""The run with which an owner continues another: which one a node follows, when, and what keeps it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from benchmarks.friends import befriend
from neuroshard.config.run_parameters import BranchPoint
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.network import InMemoryNetwork
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.node.successors import ENTRY_SECONDS, ROUND_SECONDS, SuccessorFollower
from neuroshard.runs.finding import RunOrigin
from neuroshard.runs.offer import RunOffer, continues, last_successor
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.types import RunId
from tests.node.test_peer_network import OFFER, OWNER, PARAMETERS, World, status, until, virtual
from tests.worlds.claims import identity_of

STRANGER = Wallet.from_secret(TokenSecret("hex", bytes([9] * 32)))


def branch_of(offer: RunOffer, *, signer: Wallet = OWNER, outer_step: int = 3) -> RunOffer:
    point = BranchPoint(offer.run_id, outer_step, offer.data_run_id, ("a" * 64,), (40,))
    return RunOffer.of_new_run(SignedRunParameters.sign(signer, replace(PARAMETERS, branch=point)))


def succeeded(offer: RunOffer, by: str, *, version: int = 2) -> RunOffer:
    """A run whose owner has named another one as its successor."""
    parameters = replace(offer.parameters, version=version, successor=by)
    return offer.with_version(SignedRunParameters.sign(OWNER, parameters))


def finder_of(*offers: RunOffer) -> Callable[[RunId], RunOffer | None]:
    return {offer.run_id: offer for offer in offers}.get


def test_a_successor_of_a_successor_is_found_as_long_as_the_runs_are_known() -> None:
    third = branch_of(branch_of(OFFER), outer_step=9)
    second = succeeded(branch_of(OFFER), third.run_id)
    first = succeeded(OFFER, second.run_id)
    assert last_successor(first, finder_of(second, third)) == third
    assert last_successor(first, finder_of(second)) == second
    assert last_successor(first, finder_of()) == first


def test_only_a_branch_of_the_same_owner_continues_a_run() -> None:
    mine, foreign, other = branch_of(OFFER), branch_of(OFFER, signer=STRANGER), branch_of(branch_of(OFFER))
    assert continues(mine, OFFER)
    for wrong in (foreign, other, OFFER):
        assert not continues(wrong, OFFER)
        named = succeeded(OFFER, wrong.run_id)
        assert last_successor(named, finder_of(wrong, named)) == named
    # a branch cannot lead back: the id of the first run depends on none of the later ones
    circle = succeeded(mine, OFFER.run_id)
    assert last_successor(circle, finder_of(OFFER, circle)) == circle


class Follower:
    """A node of the run with everything that a follower needs; its restart ends nothing."""

    def __init__(self, folder: Path, network: InMemoryNetwork, **settings: Any) -> None:
        self.network: PeerNetwork = World(folder, network).peer_network(0, **settings)
        self.folder = self.network.settings.data_dir
        self.restarts = list[str]()
        self.warnings = list[str]()
        self.rounds = SimpleNamespace(in_round=False, certified=0)
        stop: Any = SimpleNamespace(ask_restart=self.restarts.append)
        publisher: Any = SimpleNamespace(warn=lambda *words: self.warnings.extend(words))
        self.network.join(OFFER, lambda: status(0), is_shared=True)
        self._follower = SuccessorFollower(self.network.settings, self.network, stop, publisher)

    def learn(self, offer: RunOffer) -> None:
        """The owner's version, as a peer sends it."""
        assert self.network.exchange.followed is not None
        self.network.exchange.followed.learn(offer)

    def is_invited_to(self, offer: RunOffer) -> None:
        befriend(self.folder, offer, identity_of(0).delegation.grant.wallet_public_key, OWNER)

    async def run(self) -> None:
        self.network.joined = JoinedStandIn(self.rounds)  # type: ignore[assignment]
        await self._follower.run()


@dataclass(frozen=True)
class JoinedStandIn:
    """The stages of the run here."""

    rounds: Any

    @property
    def in_round(self) -> bool:
        return bool(self.rounds.in_round)

    def has_certified(self, version: int) -> bool:
        return bool(self.rounds.certified >= version)


def following(tmp_path: Path, scenario: Callable[[Follower], Any], **settings: Any) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network:
            follower = Follower(tmp_path, network, **settings)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follower.network.networking.run)
                tasks.start_soon(follower.run)
                await scenario(follower)
                tasks.cancel_scope.cancel()

    virtual(main)


def test_a_node_follows_when_the_chain_has_the_successor_and_its_round_has_ended(tmp_path: Path) -> None:
    async def scenario(node: Follower) -> None:
        new = branch_of(OFFER)
        JoinedRuns(node.folder).keep(new)
        node.is_invited_to(new)
        node.rounds.in_round = True
        await anyio.sleep(30)
        assert node.restarts == node.warnings == []
        node.learn(succeeded(OFFER, new.run_id))
        node.rounds.certified = 2
        await anyio.sleep(2 * ENTRY_SECONDS)
        assert node.restarts == []  # the round is not over
        node.rounds.in_round = False
        await until(5, lambda: bool(node.restarts))
        assert node.restarts == [f"the owner continues the run as run {new.run_id[:16]}"]
        assert "follows" in node.warnings[0]
        JoinedRuns(node.folder).keep(succeeded(OFFER, new.run_id))
        found = await node.network.finder.named(OFFER.run_id, lambda _: None)  # what the next start does
        assert (found.offer, found.origin) == (new, RunOrigin.SUCCESSOR)

    following(tmp_path, scenario)


def test_a_stuck_run_is_left_although_its_chain_does_not_have_the_successor(tmp_path: Path) -> None:
    async def scenario(node: Follower) -> None:
        new = branch_of(OFFER)
        JoinedRuns(node.folder).keep(new)
        node.is_invited_to(new)
        node.learn(succeeded(OFFER, new.run_id))
        await anyio.sleep(ENTRY_SECONDS - 5)
        assert node.restarts == []
        await until(10, lambda: bool(node.restarts))

    following(tmp_path, scenario)


def test_a_round_whose_voters_are_gone_does_not_keep_a_member(tmp_path: Path) -> None:
    async def scenario(node: Follower) -> None:
        new = branch_of(OFFER)
        JoinedRuns(node.folder).keep(new)
        node.is_invited_to(new)
        node.rounds.in_round = True
        node.learn(succeeded(OFFER, new.run_id))
        await anyio.sleep(ROUND_SECONDS - 5)
        assert node.restarts == []
        await until(10, lambda: bool(node.restarts))

    following(tmp_path, scenario)


def test_without_a_pass_or_without_the_parameters_a_node_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(node: Follower) -> None:
        new = branch_of(OFFER)
        node.rounds.certified = 2
        node.learn(succeeded(OFFER, new.run_id))
        await anyio.sleep(300)
        assert (node.restarts, "No peer sends it yet." in caplog.text) == ([], True)
        JoinedRuns(node.folder).keep(new)
        await anyio.sleep(300)
        assert (node.restarts, "has no invitation to it" in caplog.text) == ([], True)
        node.is_invited_to(new)
        await until(120, lambda: bool(node.restarts))

    with caplog.at_level(logging.WARNING):
        following(tmp_path, scenario)


@pytest.mark.parametrize("wrong", [branch_of(OFFER, signer=STRANGER), branch_of(branch_of(OFFER))])
def test_a_run_that_does_not_continue_this_one_is_not_followed(
    tmp_path: Path, wrong: RunOffer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(node: Follower) -> None:
        JoinedRuns(node.folder).keep(wrong)
        node.rounds.certified = 2
        node.learn(succeeded(OFFER, wrong.run_id))
        await anyio.sleep(600)
        assert node.restarts == []
        assert "not a branch of this run by the same owner" in caplog.text

    following(tmp_path, scenario)


def test_the_owner_of_a_computer_decides_whether_it_follows(tmp_path: Path) -> None:
    async def scenario(node: Follower) -> None:
        new = branch_of(OFFER)
        JoinedRuns(node.folder).keep(new)
        node.is_invited_to(new)
        node.rounds.certified = 2
        node.learn(succeeded(OFFER, new.run_id))
        await anyio.sleep(600)
        assert node.restarts == []
        assert "because follow_successor is off" in node.warnings[0]
        JoinedRuns(node.folder).keep(succeeded(OFFER, new.run_id))
        found = await node.network.finder.named(OFFER.run_id, lambda _: None)
        assert (found.offer.run_id, found.origin) == (OFFER.run_id, RunOrigin.NAMED)

    following(tmp_path, scenario, follow_successor=False)
