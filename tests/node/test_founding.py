"""Who gets the first seats of a stage, with a swarm whose holders the test names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.chain import Chain
from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.foundation import Foundation, SignedFoundation, StageStart
from neuroshard.consensus.waypoints import Milestone, Point
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.model.architecture import StagePlan
from neuroshard.network import InMemoryNetwork
from neuroshard.node.founding import GONE_SECONDS, PATIENCE_SECONDS, Founder
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.offer import RunOffer
from neuroshard.state.download import ReplicaClient
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.transfer_messages import StageName
from neuroshard.types import LayerRange, NodeId, WalletId
from tests.worlds.clock import at_once
from tests.worlds.free_names import FreeName
from tests.worlds.nodes import OWNER, PINS, SHAPE

OWN, SECOND, FRIEND, STRANGER = map(NodeId, ("own", "second", "friend", "stranger"))
DEPUTY = Wallet.from_secret(TokenSecret("hex", b"d" * 32))
WALLETS = {SECOND: OWNER.wallet_id, FRIEND: WalletId("f" * 32), STRANGER: WalletId("e" * 32)}


def versions_of(admission: str) -> RunVersions:
    parameters = RunParameters("test", 1, SHAPE, 3, 1, 4, 7, PINS, admission=cast("Any", admission))
    return RunVersions(RunOffer.of_new_run(SignedRunParameters.sign(OWNER, parameters)))


@dataclass
class NamedHolders:
    """A swarm of three stages, seen from the owner's node, which holds the first one."""

    versions: RunVersions
    holders: dict[int, list[NodeId]]
    node_id: NodeId = OWN
    wallet_id: WalletId = OWNER.wallet_id
    plan: StagePlan = field(default_factory=lambda: StagePlan.even(SHAPE.layer_count, 3))
    membership: Any = field(default_factory=lambda: SimpleNamespace(view=SimpleNamespace(members={})))
    donor: Any = field(
        default_factory=lambda: SimpleNamespace(replica_status=lambda _name: None, local=lambda _name: None)
    )
    asking: Any = None
    rounds: Any = field(default_factory=lambda: SimpleNamespace(last_chain=lambda _name: None))

    def holders_of(self, stage: int) -> list[NodeId]:
        return self.holders.get(stage, [])

    def wallet_of(self, node: NodeId) -> WalletId | None:
        return WALLETS.get(node)

    def name_of(self, layers: LayerRange) -> LayerRange:
        return layers


def seats_after(
    swarm: NamedHolders, folder: Path, wallet: Wallet = OWNER, seconds: float = PATIENCE_SECONDS + 10
) -> dict[int, list[NodeId]]:
    """The nodes with a seat of each founded stage, a while after the node of a wallet began to look."""

    async def main() -> None:
        founder = Founder(cast("Any", swarm), wallet, StoredFoundations(folder))
        with trio.move_on_after(seconds):
            await founder.run()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    founded = {stage: swarm.versions.founding_of(stage) for stage in range(3)}
    return {
        stage: [seat.node_id for seat in founding.start.committee.seats]
        for stage, founding in founded.items()
        if founding is not None
    }


@pytest.mark.parametrize(
    ("admission", "expected"),
    [("friends", {0: [OWN, FRIEND], 1: [FRIEND]}), ("strangers", {0: [OWN]})],
)
def test_names_that_cost_nothing_get_no_seat(admission: str, expected: dict[int, list[NodeId]], tmp_path: Path) -> None:
    """Where wallets are free, a stage that only strangers hold waits for the owner."""
    swarm = NamedHolders(versions_of(admission), {0: [OWN, FRIEND], 1: [FRIEND]})
    assert seats_after(swarm, tmp_path) == expected


def test_another_node_of_the_owner_founds_its_stage_of_an_open_run(tmp_path: Path) -> None:
    swarm = NamedHolders(versions_of("strangers"), {0: [OWN], 1: [STRANGER, SECOND]})
    assert seats_after(swarm, tmp_path) == {0: [OWN], 1: [SECOND]}


@pytest.mark.parametrize(("deputies", "voters"), [((DEPUTY,), [SECOND]), ((), [OWN])])
def test_a_deputy_founds_on_request_only_while_the_owner_trusts_it(
    deputies: tuple[Wallet, ...], voters: list[NodeId], tmp_path: Path
) -> None:
    versions, stored = versions_of("friends"), StoredFoundations(tmp_path)
    committee = Committee.founded([Seat(OWNER.wallet_id, OWN, 0)], is_open=False)
    known = versions.foundations
    named = tuple(each.public_key for each in deputies)
    statements = (((StageStart(0, committee),), ()), ((), (DEPUTY.public_key,)), ((), named))
    for starts, keys in statements:
        known = known.with_statements([known.next(OWNER, starts, keys)])
    versions.learn_foundations(known)
    state = ReplicaStatus(True, 30, 3, "3" * 64)
    swarm = NamedHolders(versions, {}, SECOND, DEPUTY.wallet_id)
    swarm.donor = SimpleNamespace(
        replica_status=lambda name: state if name.start == 0 else None, local=lambda _name: None
    )
    stored.request_new(versions.offer)
    assert seats_after(swarm, tmp_path, DEPUTY) == {0: voters}
    assert stored.is_new_requested(versions.offer) == (not deputies)


@pytest.mark.parametrize(("height", "is_signed"), [(127, False), (128, True)])
def test_a_deputy_waits_until_its_chain_has_reached_the_point_that_it_knows(
    height: int, is_signed: bool, tmp_path: Path
) -> None:
    versions, stored = versions_of("friends"), StoredFoundations(tmp_path)
    start = StageStart(0, Committee.founded([Seat(OWNER.wallet_id, OWN, 0)], is_open=False))
    known = versions.foundations
    versions.learn_foundations(known.with_statements([known.next(OWNER, [start], (DEPUTY.public_key,))]))
    state = ReplicaStatus(True, 30, 3, "3" * 64)
    swarm = NamedHolders(versions, {}, SECOND, DEPUTY.wallet_id)
    swarm.donor = SimpleNamespace(
        replica_status=lambda name: state if name.start == 0 else None, local=lambda _name: None
    )
    standing, point = SimpleNamespace(height=height, outer_step=3, value="a" * 64), Point(Milestone(128, "a" * 64), "")
    chain = SimpleNamespace(standing=standing, points=(point,), ledger=SimpleNamespace(versions=()))
    swarm.rounds = SimpleNamespace(last_chain=lambda name: chain if name.start == 0 else None)
    stored.request_new(versions.offer)
    assert seats_after(swarm, tmp_path, DEPUTY) == {0: [SECOND if is_signed else OWN]}


@pytest.mark.parametrize("others", [(), (FRIEND, STRANGER)])
def test_the_owners_node_founds_no_stage_again_on_which_others_vote(others: tuple[NodeId, ...], tmp_path: Path) -> None:
    """It sees no seat for a while: they may be gone, or names that cost nothing may surround it."""
    versions, lost = versions_of("strangers"), NodeId("the owner's lost computer")
    seats = [Seat(OWNER.wallet_id, lost, 0), *(Seat(WALLETS[node], node, 0) for node in others)]
    committee = Committee.founded(seats, is_open=True)
    versions.learn_foundations(
        versions.foundations.with_statements([versions.foundations.next(OWNER, [StageStart(0, committee)])])
    )
    swarm = NamedHolders(versions, {0: [OWN, SECOND]})
    name = StageName(versions.offer.run_id, swarm.plan[0])
    with InMemoryNetwork() as network:
        FreeName(SECOND, network, lambda: ReplicaStatus(True, 30, 3, "3" * 64))
        swarm.name_of = lambda _layers: name  # type: ignore[assignment]
        swarm.asking = ReplicaClient(network.join(OWN), offload=at_once)
        found = seats_after(swarm, tmp_path, seconds=PATIENCE_SECONDS + GONE_SECONDS + 30)
    assert found == {0: [lost, *others] if others else [SECOND]}


def test_a_foundation_follows_the_list_that_a_command_has_just_stored(tmp_path: Path) -> None:
    """The running node has not read the file yet."""
    versions, stored = versions_of("strangers"), StoredFoundations(tmp_path)
    stored.name_voter(versions.offer, OWNER, "a" * 32)
    assert seats_after(NamedHolders(versions, {0: [OWN]}), tmp_path) == {0: [OWN]}
    founding = versions.founding_of(0)
    assert founding is not None
    assert (founding.epoch, founding.trusted) == (1, ("a" * 32,))


def test_damaged_foundations_are_set_aside_and_lost_by_no_later_write(tmp_path: Path) -> None:
    offer, stored = versions_of("friends").offer, StoredFoundations(tmp_path)
    file = tmp_path / "runs" / "joined" / f"{offer.run_id}.foundations"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"damaged")
    assert not stored.read(offer).known
    stored.write(offer, stored.read(offer))
    assert file.with_name(f"{file.name}.damaged").read_bytes() == b"damaged"


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("wallet", [OWNER, DEPUTY])
@pytest.mark.parametrize("seconds", [PATIENCE_SECONDS + 10, GONE_SECONDS + 20])
def test_of_two_first_foundations_of_the_owner_the_unused_one_yields(
    wallet: Wallet, step: int, seconds: float, tmp_path: Path
) -> None:
    """The owner's node has founded alone and meets the foundation of the owner's second one. A person decides if it has
    made a step. A deputy's node signs nothing on its own.
    """
    versions = versions_of("friends")
    own, other = (
        SignedFoundation.sign(signer, Foundation(versions.offer.run_id, 0, (StageStart(0, committee),)))
        for signer, committee in (
            (OWNER, Committee.founded([Seat(OWNER.wallet_id, OWN, 0)], is_open=False)),
            (OWNER, Committee.founded([Seat(OWNER.wallet_id, SECOND, 0)], is_open=False)),
        )
    )
    versions.learn_foundations(versions.foundations.with_statements([own]))
    founding = versions.founding_of(0)
    assert founding is not None
    chain, state = Chain.founded(founding), ReplicaStatus(True, 30, step, "3" * 64)
    versions.learn_foundations(versions.foundations.with_statements([other]))
    swarm = NamedHolders(versions, {0: [OWN, SECOND]}, wallet_id=wallet.wallet_id)
    swarm.donor = SimpleNamespace(replica_status=lambda _name: state)
    swarm.rounds = SimpleNamespace(last_chain=lambda _name: chain)
    # if both are unused, the one with the higher hash yields, so that not both do
    yields = wallet is OWNER and step == 0 and (own.id > other.id or seconds > GONE_SECONDS)
    seats_after(swarm, tmp_path, wallet, seconds=seconds)
    assert versions.foundations.is_contradictory == (not yields)
    after = versions.founding_of(0)
    assert (None if after is None else after.statement) == (other.id if yields else None)
