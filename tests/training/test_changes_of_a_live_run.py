"""A version that the owner signs reaches the chain through any seat, and all replicas change at one outer step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.committee import VERSION_STEPS, ChangeParameters, change_of
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.network import InMemoryNetwork
from neuroshard.node.stage_versions import StageVersions
from neuroshard.types import NodeId
from tests.worlds.replicas import DUE_SECONDS, NAMES, OUTER, SimulatedReplica, for_seconds, play
from tests.worlds.stages import PARAMETERS

A, B, C = NAMES[:3]
OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))  # of A, whose seat is the first one
PINS = replace(PARAMETERS.genesis, root="a" * 64, tokenizer_sha256="b" * 64)
FIRST = replace(PARAMETERS, genesis=PINS, outer=replace(OUTER, codec="int4"))
INITIAL = SignedRunParameters.sign(OWNER, FIRST)


def version(number: int, *, holds_from: int = 0, codec: str = "fp32") -> ChangeParameters:
    outer = replace(FIRST.outer, codec=codec)
    return change_of(
        SignedRunParameters.sign(OWNER, replace(FIRST, version=number, holds_from_outer_step=holds_from, outer=outer))
    )


class Member:
    """A replica whose parameters follow from its own chain, and the versions that it has used at each outer step."""

    def __init__(self, name: NodeId, network: InMemoryNetwork, *, seats: tuple[NodeId, ...] = (A, B, C)) -> None:
        self.used = defaultdict[int, set[int]](set)
        self._versions: StageVersions | None = None
        seed = NAMES.index(name)
        self.replica = SimulatedReplica(name, network, seed, seats=seats, scheme=FIRST.outer, versions=self._at)
        self._versions = StageVersions(INITIAL, self.replica.group.chain)
        self.replica.may_be_alone = len(seats) == 1

    def _at(self, outer_step: int) -> OuterOptimization:
        if self._versions is None:
            return FIRST.outer
        found = self._versions.at(outer_step)
        self.used[outer_step].add(found.version)
        return found.outer

    @property
    def starts(self) -> dict[int, int]:
        """First outer step of each certified version."""
        return {each.number: each.start for each in self.replica.group.chain.versions}

    @property
    def outer_step(self) -> int:
        return self.replica.state.outer_step

    def first_step_of(self, number: int) -> int:
        """The first outer step at which it has used a version, and none before or after with another one."""
        assert all(len(versions) == 1 for versions in self.used.values()), self.used
        return min(step for step, versions in self.used.items() if versions == {number})


def check_agreement(*members: Member) -> None:
    """All have the same anchor and velocity after each outer step that two of them know."""
    for one in members:
        for other in members:
            for step in one.replica.anchors.keys() & other.replica.anchors.keys():
                assert one.replica.anchors[step] == other.replica.anchors[step], step


async def live(seconds: float, *members: Member) -> None:
    await for_seconds(seconds, *(member.replica for member in members))


def test_a_version_that_one_seat_knows_applies_at_all_members_from_one_outer_step() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = a, b, c = [Member(name, network) for name in (A, B, C)]
        await live(2 * DUE_SECONDS + 5, *members)
        before = b.outer_step
        assert before >= 1
        b.replica.changes = (version(2),)  # neither the owner's node nor the third one has heard of it
        await live(6 * DUE_SECONDS, *members)
        (start,) = {member.starts[2] for member in members}
        assert start == before + 1 + VERSION_STEPS
        assert [member.first_step_of(2) for member in members] == [start] * 3
        assert min(member.outer_step for member in members) > start
        check_agreement(a, b, c)

    play(scenario)


def test_the_owner_names_a_later_step() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = [Member(name, network) for name in (A, B, C)]
        members[0].replica.changes = (version(2, holds_from=7),)
        await live(9 * DUE_SECONDS, *members)
        assert [member.first_step_of(2) for member in members] == [7] * 3

    play(scenario)


def test_a_member_that_was_away_at_the_value_changes_at_the_same_step() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = a, b, c = [Member(name, network) for name in (A, B, C)]
        await live(DUE_SECONDS + 5, *members)
        stood = c.outer_step
        a.replica.changes = (version(2),)
        await live(5 * DUE_SECONDS, a, b)  # a quorum without the third
        start = a.starts[2]
        assert (c.outer_step, c.starts) == (stood, {})
        assert start < a.outer_step <= stood + 5  # the aggregates since then are kept
        await live(3 * DUE_SECONDS, *members)
        assert c.starts == a.starts
        assert c.first_step_of(2) == start
        assert c.outer_step > start
        check_agreement(*members)

    play(scenario)


def test_without_a_quorum_a_version_applies_nowhere_until_the_others_return() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = a, b, c = [Member(name, network) for name in (A, B, C)]
        await live(DUE_SECONDS + 5, *members)
        stood = a.outer_step
        a.replica.changes = (version(2),)
        await live(5 * DUE_SECONDS, a)  # the owner alone is no quorum of three
        assert (a.outer_step, a.starts) == (stood, {})
        await live(6 * DUE_SECONDS, *members)
        assert a.starts == b.starts == c.starts
        assert [member.first_step_of(2) for member in members] == [a.starts[2]] * 3
        check_agreement(*members)

    play(scenario)


def test_the_owner_alone_changes_its_run() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a = Member(A, network, seats=(A,))
        await live(2 * DUE_SECONDS + 5, a)
        before = a.outer_step
        a.replica.changes = (version(2),)
        await live(6 * DUE_SECONDS, a)
        assert a.first_step_of(2) == a.starts[2]
        assert before < a.starts[2] <= a.outer_step

    play(scenario)


@pytest.mark.parametrize("first", [A, B])
def test_of_two_versions_of_one_number_all_members_apply_the_same(first: NodeId) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = [Member(name, network) for name in (A, B, C)]
        one, other = version(2, codec="fp32"), version(2, codec="bf16")
        for member in members:
            member.replica.changes = (one if member.replica.name == first else other,)
        await live(7 * DUE_SECONDS, *members)
        (signed,) = {member.replica.group.chain.versions[0].signed for member in members}
        assert signed in (one.signed, other.signed)
        assert len({member.first_step_of(2) for member in members}) == 1
        check_agreement(*members)

    play(scenario)


def test_versions_that_follow_each_other_all_apply_in_their_turn() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = [Member(name, network) for name in (A, B, C)]
        for member in members[1:]:
            member.replica.changes = (version(2, holds_from=4), version(3, holds_from=6, codec="bf16"))
        await live(9 * DUE_SECONDS, *members)
        for member in members:
            assert (member.first_step_of(2), member.first_step_of(3)) == (4, 6)
        check_agreement(*members)

    play(scenario)
