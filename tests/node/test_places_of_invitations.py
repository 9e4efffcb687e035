"""More wallets join with an invitation than it has places, at different nodes: in the end all agree who is a member."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import anyio
import pytest

from neuroshard.identity.invitations import MemberPass
from neuroshard.identity.pass_register import MAX_EXCESS, PassRegister
from neuroshard.membership.run_members import Papers
from neuroshard.node.peer_network import PAPERS_SECONDS, PeerNetwork
from neuroshard.node.run_desk import PATIENCE_SECONDS, settle_places
from neuroshard.types import WalletId
from tests.node.test_closed_run import OFFER, OWNER, Friends, ids, now, one_use, play, serving, status, until
from tests.worlds.clock import at_once

ANNA, BEN = 5, 6  # both have the same link, for one wallet


async def joined(world: Friends, tasks: Any, number: int) -> PeerNetwork:
    """A computer that enters the run with the link, as a start with it does."""
    node = world.node(number, has_pass=False, invitation=one_use(), run=OFFER.run_id)
    tasks.start_soon(node.networking.run)
    found = await node.finder.first(lambda _: None)
    node.serve(found.offer, status, is_shared=True)
    return node


def register_of(node: PeerNetwork) -> PassRegister:
    assert node.joined is not None
    assert node.joined.members is not None
    return node.joined.members.register


def members_at(node: PeerNetwork, newcomers: Collection[PeerNetwork]) -> set[WalletId]:
    """The newcomers that a node takes for members."""
    wallets = {each.identity.wallet_id for each in newcomers}
    return {wallet for wallet in wallets if not register_of(node).refusal(wallet)}


async def friends_of(world: Friends, tasks: Any) -> list[PeerNetwork]:
    """The owner and three friends; the owner's node settles the places."""
    friends = await serving(world, tasks, range(4))
    tasks.start_soon(settle_places, friends[0], OWNER, friends[0].settings.data_dir, at_once)
    await anyio.sleep(30)
    return friends


REPORT_SECONDS = 20.0  # in which the others hear of a newcomer twice
SETTLED_SECONDS = REPORT_SECONDS + PATIENCE_SECONDS + 2 * PAPERS_SECONDS


@pytest.mark.parametrize("with_owner", [ANNA, BEN])
def test_two_friends_with_one_place_join_at_different_nodes(with_owner: int, tmp_path: Path) -> None:
    """The one that the owner's node saw first stays, in any order of their keys. Nobody waits for the newcomers to say
    their passes again: after the first minute they do so every ten minutes.
    """

    async def scenario(world: Friends, tasks: Any) -> None:
        friends = await friends_of(world, tasks)
        (alone,) = {ANNA, BEN} - {with_owner}
        world.network.partition(ids(0, 1, with_owner), ids(2, 3, alone))
        newcomers = [await joined(world, tasks, number) for number in (ANNA, BEN)]
        await anyio.sleep(100)
        sides = [members_at(friend, newcomers) for friend in friends]
        assert [len(side) for side in sides] == [1] * 4
        assert sides[0] == sides[1] != sides[2] == sides[3]
        world.network.partition()
        await until(SETTLED_SECONDS, lambda: all(members_at(friend, newcomers) == sides[0] for friend in friends))
        await anyio.sleep(150)
        assert all(members_at(friend, newcomers) == sides[0] for friend in friends)
        (second,) = (each for each in newcomers if each.identity.wallet_id not in sides[0])
        for friend in friends[2:]:  # they took it for a member
            assert "saw another wallet with it first" in register_of(friend).refusal(second.identity.wallet_id)

    play(tmp_path, scenario)


def test_while_the_owner_is_away_each_side_keeps_its_friend_and_the_owners_return_settles_it(tmp_path: Path) -> None:
    async def scenario(world: Friends, tasks: Any) -> None:
        friends = await friends_of(world, tasks)
        world.network.partition(ids(0), ids(1, ANNA), ids(2, 3, BEN))
        newcomers = [await joined(world, tasks, number) for number in (ANNA, BEN)]
        await anyio.sleep(100)
        world.network.partition(ids(0), ids(1, 2, 3, ANNA, BEN))
        await anyio.sleep(60)
        seen = [members_at(friend, newcomers) for friend in friends]
        assert [len(each) for each in seen] == [0, 1, 1, 1]
        assert seen[1] != seen[2] == seen[3]
        world.network.partition()

        def agree() -> bool:
            known = {frozenset(members_at(friend, newcomers)) for friend in friends}
            return [len(each) for each in known] == [1]

        await until(SETTLED_SECONDS, agree)

    play(tmp_path, scenario)


def test_no_number_of_wallets_that_come_later_takes_a_place_or_a_word_of_the_owner(tmp_path: Path) -> None:
    """The link has leaked. Names are free, so their keys sort before and after every other one, and pass any hash."""

    async def scenario(world: Friends, tasks: Any) -> None:
        friends = await friends_of(world, tasks)
        anna = await joined(world, tasks, ANNA)
        await anyio.sleep(60)
        expected = {anna.identity.wallet_id}
        strangers = [await joined(world, tasks, number) for number in range(10, 15)]
        await anyio.sleep(300)
        assert all(members_at(friend, [anna, *strangers]) == expected for friend in friends)
        assert register_of(friends[0]).revocations() == ()

    play(tmp_path, scenario)


def test_a_member_that_vouches_for_many_wallets_brings_none_of_them_in(tmp_path: Path) -> None:
    """It knows the secret of its own invitation, so it can make any number of passes."""

    async def scenario(world: Friends, tasks: Any) -> None:
        friends = await friends_of(world, tasks)
        anna = await joined(world, tasks, ANNA)
        await anyio.sleep(60)
        made = [one_use().pass_for(bytes([number]) * 32, now()) for number in range(100, 200)]
        for friend in friends:
            assert friend.joined is not None
            assert friend.joined.members is not None
            friend.joined.members.learn(Papers(tuple(made)))
        await anyio.sleep(300)
        for friend in friends:
            register = register_of(friend)
            assert members_at(friend, [anna]) == {anna.identity.wallet_id}
            assert not any(register.pass_of(MemberPass.read(each).wallet_id) for each in made)
            assert len(register.revocations()) == MAX_EXCESS  # a bounded number of words of the owner

    play(tmp_path, scenario)
