"""Heirs: the only seat of a stage names the wallet with the copy, and that wallet continues the stage alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import anyio
import pytest
from msgspec import structs

from neuroshard.consensus.chain import Chain, ChainError, Standing
from neuroshard.consensus.committee import (
    ADMISSION_SECONDS,
    Admit,
    Candidate,
    Committee,
    EntryRules,
    InvalidEntryError,
    NameHeir,
    Seat,
)
from neuroshard.consensus.foundation import (
    KEPT_HEIRS,
    Foundations,
    Founding,
    HeirNaming,
    SignedSuccession,
    StageStart,
    Succession,
)
from neuroshard.consensus.round_messages import Phase, Quorum, Value, Vote, signed_by
from neuroshard.consensus.stage_chain import InMemoryChainStore, StageChain, StoredChain
from neuroshard.consensus.waypoints import Milestone, SignedWaypoint, Waypoint
from neuroshard.errors import DataError
from neuroshard.identity import NodeIdentity, TokenSecret, Wallet
from neuroshard.identity.invitations import InvitedTip
from neuroshard.identity.pass_register import PassRegister
from neuroshard.node.invited_tip import verified_tip
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.types import RunId, WalletId
from tests.worlds.claims import identity_of
from tests.worlds.clock import at_once
from tests.worlds.nodes import OFFER, OWNER

RUN = OFFER.run_id
HOLDER, HEIR, OTHER = (identity_of(number) for number in (1, 2, 3))
NOW = 1_700_000_000.0
STAGE = 1


def key_of(number: int) -> Wallet:
    """The wallet of `identity_of`."""
    return Wallet.from_secret(TokenSecret("hex", (number + 1).to_bytes(32, "big")))


def lone(identity: NodeIdentity, *, is_open: bool = False) -> Committee:
    return Committee.founded([Seat(identity.wallet_id, identity.node_id, 0)], is_open=is_open)


def founded(*seats: Committee, before: Foundations | None = None, signer: Wallet = OWNER) -> Foundations:
    """The owner founds stages 0, 1, ... with these committees."""
    known = RunVersions(OFFER).foundations if before is None else before
    return known.with_statements([known.next(signer, [StageStart(stage, each) for stage, each in enumerate(seats)])])


KNOWN = founded(lone(OTHER), lone(HOLDER))
(FIRST,) = KNOWN.highest


def naming(
    author: NodeIdentity = HOLDER, heir: NodeIdentity = HEIR, height: int = 5, stage: int = STAGE, of: str = FIRST.id
) -> bytes:
    return signed_by(author, HeirNaming(of, stage, height, heir.wallet_id), NOW).claim


def succession(
    said: bytes | None = None,
    signer: Wallet | None = None,
    *,
    height: int = 7,
    committee: Committee | None = None,
    of: str = FIRST.id,
    stage: int = STAGE,
    root: str | None = "a" * 64,
    run: RunId = RUN,
    voters: tuple[Candidate, ...] = (),
) -> SignedSuccession:
    start = StageStart(stage, committee or lone(HEIR), height, 3, root, "b" * 64, candidates=voters)
    content = Succession(run, of, start, naming() if said is None else said)
    return SignedSuccession.sign(signer or key_of(2), content)


def founding(known: Foundations, stage: int = STAGE, members: PassRegister | None = None) -> Founding:
    found = RunVersions(OFFER, known, members=members).founding_of(stage)
    assert found is not None
    return found


def test_an_heir_continues_its_stage_and_no_other_one_stops() -> None:
    signed = succession()
    known = KNOWN.with_statements((), (), [signed])
    assert known.current == FIRST
    found = founding(known)
    assert (found.statement, found.start.height, found.start.root) == (signed.id, 7, "a" * 64)
    assert found.start.committee.wallets == {HEIR.wallet_id}
    assert founding(known, 0) == founding(KNOWN, 0)
    again = founded(lone(OTHER), lone(OTHER), before=known)  # the owner's next word about the stage
    assert founding(again).statement == again.highest[0].id
    elsewhere = known.with_statements([known.next(OWNER, [StageStart(0, lone(OTHER))])])  # one about another stage
    assert founding(elsewhere).statement == signed.id


def two_seats() -> Committee:
    seats = [Seat(each.wallet_id, each.node_id, 0) for each in (HOLDER, OTHER)]
    return Committee.founded(seats, is_open=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: succession(signer=key_of(3)),  # another wallet
        lambda: succession(naming(author=HEIR)),  # named by itself
        lambda: succession(naming(author=OTHER)),  # by the seat of another stage
        lambda: succession(naming(heir=OTHER)),  # not named
        lambda: succession(naming(stage=0)),  # for another stage
        lambda: succession(naming(), stage=0),
        lambda: succession(naming(of="c" * 64)),  # in another foundation
        lambda: succession(height=4),  # from before the naming
        lambda: succession(root=None),
        lambda: succession(committee=two_seats()),
        lambda: succession(committee=lone(HEIR, is_open=True)),
        lambda: succession(voters=(Candidate(OTHER.wallet_id, OTHER.node_id, ADMISSION_SECONDS),)),
        lambda: succession(run=RunId("1" * 64)),
        lambda: succession(b"no claim"),
        lambda: succession(naming()[:-1] + b"\0"),
        lambda: SignedSuccession(succession().signed, OWNER.public_key),
    ],
)
def test_what_the_only_seat_has_not_said_continues_nothing(make: Callable[[], SignedSuccession]) -> None:
    with pytest.raises(DataError):
        KNOWN.with_statements((), (), [make()])


def test_a_stage_with_several_seats_or_strangers_has_no_heir() -> None:
    for committee in (two_seats(), lone(HOLDER, is_open=True)):
        known = founded(lone(OTHER), committee)
        (first,) = known.highest
        with pytest.raises(DataError, match="not named by the only seat"):
            known.with_statements((), (), [succession(naming(of=first.id), of=first.id)])


def test_the_wallet_that_was_named_last_counts_in_every_order() -> None:
    earlier = succession(naming(height=5), height=90)
    later = succession(naming(heir=OTHER, height=6), key_of(3), committee=lone(OTHER))
    for order in permutations([earlier, later]):
        known = KNOWN
        for each in order:
            known = known.with_statements((), (), [each])
        assert founding(known).statement == later.id
        assert known == KNOWN.with_statements((), (), [later, earlier])


def test_an_heir_of_a_void_statement_or_of_one_that_is_not_known_is_ignored() -> None:
    elsewhere = founded(lone(HOLDER), lone(HOLDER)).highest[0].id
    signed = succession(naming(of=elsewhere), of=elsewhere)
    assert KNOWN.with_statements((), (), [signed]) == KNOWN


def test_an_heir_does_not_set_its_stage_back_below_the_owners_waypoint_or_the_tip_of_an_invitation() -> None:
    known = KNOWN.with_statements((), (), [succession(height=127)])
    assert founding(known).statement != FIRST.id
    waypoint = Waypoint(RUN, STAGE, FIRST.id, 0, Milestone(128, "a" * 64), 7)
    found = founding(known.with_statements((), [SignedWaypoint.sign(OWNER, waypoint)]))
    assert found.statement == FIRST.id
    shared = with_second_seat(certified(Chain.founded(founding(known)), by=HEIR), by=HEIR)
    assert anyio.run(followed, shared, founding(known), found).statement == FIRST.id  # however many vote there
    tip = InvitedTip(STAGE, 0, bytes.fromhex(FIRST.id), 128, b"v" * 32)
    found = RunVersions(OFFER, known, tip).founding_of(STAGE)
    assert found is not None
    assert found.statement == FIRST.id


def test_the_tip_of_an_invitation_may_be_on_the_line_of_an_heir() -> None:
    signed = succession()
    tip = InvitedTip(STAGE, 1, bytes.fromhex(signed.id))
    assert RunVersions(OFFER, KNOWN, tip).founding_of(STAGE) is None
    found = RunVersions(OFFER, KNOWN.with_statements((), (), [signed]), tip).founding_of(STAGE)
    assert found is not None
    assert found.statement == signed.id


class Removed(PassRegister):
    """The owner has ended the membership of the heir."""

    def is_removed(self, wallet: WalletId) -> bool:
        return wallet == HEIR.wallet_id


def test_a_wallet_that_the_owner_has_removed_is_nobodys_heir() -> None:
    known, members = KNOWN.with_statements((), (), [succession()]), Removed(RUN, OWNER.public_key)
    found = founding(known, members=members)
    assert found.statement == FIRST.id
    own = certified(Chain.founded(founding(known)), by=HEIR)
    assert anyio.run(followed, own, founding(known), found).statement == FIRST.id
    shared = with_second_seat(own, by=HEIR)  # those that vote with it go on: its seat can be removed
    assert anyio.run(followed, shared, founding(known), found).standing == shared.standing


def test_heirs_are_stored_and_sent_with_the_statements(tmp_path: Path) -> None:
    stored, known = StoredFoundations(tmp_path), KNOWN.with_statements((), (), [succession()])
    stored.write(OFFER, known)
    assert stored.read(OFFER) == known


# The chain

EMPTY_VALUE = Value("5" * 64, "f" * 64, 1, "f" * 64, "f" * 64, 1, "0" * 64, "1" * 64)


def certified(chain: Chain, *entries: NameHeir | Admit, by: NodeIdentity = HOLDER, sequences: int = 0) -> Chain:
    """The chain with the next value of its only seat: a step that it makes alone."""
    standing: Standing = chain.standing
    rules = EntryRules(standing.height + 1, OWNER.wallet_id)
    after = rules.applied(chain.ledger.committee, entries)
    value = structs.replace(
        EMPTY_VALUE,
        statement=standing.statement,
        height=standing.height + 1,
        parent=standing.value,
        committee=chain.ledger.committee.digest,
        outer_step=standing.outer_step + 1,
        root=standing.root or "0" * 64,
        next_root=f"{standing.outer_step + 1:064x}",
        entries=entries,
        sequences=sequences,
        next_committee=None if after == chain.ledger.committee else after,
    )
    value = structs.replace(value, ledger=chain.ledger.after(value, rules).digest)
    vote = signed_by(by, Vote(value.step_id, 0, Phase.COMMIT, value.digest), NOW)
    return chain.extended(Quorum(value, 0, Phase.COMMIT, (vote,)))


def heir(identity: NodeIdentity = HEIR, height: int = 1) -> NameHeir:
    return NameHeir(identity.wallet_id, naming(heir=identity, height=height))


def test_only_a_seat_that_is_alone_among_friends_names_an_heir() -> None:
    rules = EntryRules(1, OWNER.wallet_id)
    assert rules.applied(lone(HOLDER), [heir()]) == lone(HOLDER)
    for committee in (two_seats(), lone(HOLDER, is_open=True), lone(HEIR)):
        with pytest.raises(InvalidEntryError):
            rules.applied(committee, [heir()])


def test_the_ledger_keeps_the_last_heir_until_there_is_a_second_seat() -> None:
    chain = certified(Chain.founded(founding(KNOWN)))
    assert chain.ledger.heir is None
    chain = certified(certified(chain, heir(height=2)), heir(OTHER, height=3))
    for _ in range(3):
        chain = certified(chain)
    assert chain.ledger.heir is not None
    assert chain.ledger.heir.wallet_id == OTHER.wallet_id
    shown = Chain.founded(founding(KNOWN)).proven(chain.proof())  # a newcomer sees it in the newest ledger
    assert shown.ledger.heir == chain.ledger.heir
    ready = structs.replace(chain.ledger, candidates=(Candidate(HEIR.wallet_id, HEIR.node_id, ADMISSION_SECONDS, 1),))
    chain = certified(replace(chain, ledger=ready), Admit(HEIR.wallet_id, HEIR.node_id))
    assert len(chain.ledger.committee.seats) == 2
    assert chain.ledger.heir is None


def line(*heirs: NameHeir | None) -> Chain:
    chain = Chain.founded(founding(KNOWN))
    for each in heirs:
        chain = certified(chain) if each is None else certified(chain, each)
    return chain


def inherited(chain: Chain, height: int) -> SignedSuccession:
    """The heir continues from a height of this chain at which it was named."""
    return succession(naming(height=height), height=max(height, chain.standing.height))


def with_second_seat(chain: Chain, other: NodeIdentity = OTHER, by: NodeIdentity = HOLDER) -> Chain:
    """The chain after a value that gives another wallet a seat."""
    worked = Candidate(other.wallet_id, other.node_id, ADMISSION_SECONDS, 1)
    ready = replace(chain, ledger=structs.replace(chain.ledger, candidates=(worked,)))
    return certified(ready, Admit(other.wallet_id, other.node_id), by=by)


async def followed(own: Chain, before: Founding, after: Founding) -> Chain:
    """The chain that a node with this one follows after it learned of an heir, and also after a restart."""
    foundings, store = [before], InMemoryChainStore()
    store.stored = StoredChain(own.statement, own.proof())
    node = StageChain(lambda: foundings[0], store, at_once)
    await node.load()
    assert node.chain is not None
    assert node.chain.standing == own.standing
    foundings[0] = after
    started = StageChain(lambda: foundings[0], store, at_once)
    await started.load()
    assert node.chain is not None
    assert started.chain is not None
    assert started.chain.standing == node.chain.standing
    return node.chain


@pytest.mark.parametrize(
    ("own", "named_at", "is_followed"),
    [
        (line(None, heir(height=2), None), 2, True),
        (line(None), 2, True),  # it was behind when the heir was named
        (line(None, heir(height=2), heir(OTHER, height=3)), 2, False),
        (line(None, None, None), 2, False),  # an heir of another line
        (with_second_seat(line(None, heir(height=2))), 2, False),
        (with_second_seat(line(None, heir(height=2))), 10**6, False),
    ],
    ids=["its heir", "behind", "another heir since", "no heir", "another seat since", "named by one seat of two"],
)
def test_a_node_leaves_its_line_for_the_heir_that_its_own_chain_names(
    own: Chain, named_at: int, is_followed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    signed = inherited(own, named_at)
    after = founding(KNOWN.with_statements((), (), [signed]))
    chain = anyio.run(followed, own, founding(KNOWN), after)
    assert ("trains apart" not in caplog.text) == is_followed
    assert chain.statement == (signed.id if is_followed else own.statement)
    if not is_followed:
        assert chain.standing == own.standing


# Heirs that contradict each other, and heirs of heirs


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_heir_that_continues_twice_takes_no_line_from_the_others_that_vote_on_it(is_shared: bool) -> None:
    """Of two lines of one heir the one with the higher hash counts, so it can make that the later one."""
    known, more = KNOWN.with_statements((), (), [inherited(line(heir(height=1)), 1)]), KNOWN
    for height in range(20, 90):
        more = known.with_statements((), (), [succession(naming(height=1), height=height)])
        if founding(more) != founding(known) and founding(more).start.height == height:
            break
    own = certified(Chain.founded(founding(known)), by=HEIR)
    own = with_second_seat(own, by=HEIR) if is_shared else own
    chain = anyio.run(followed, own, founding(known), founding(more))
    assert chain.statement == (own.statement if is_shared else founding(more).statement)


def test_the_seat_that_was_lost_takes_no_line_from_its_heir_and_those_that_vote_with_it() -> None:
    """Its key names another heir, at a greater height."""
    known = KNOWN.with_statements((), (), [inherited(line(heir(height=1)), 1)])
    own = with_second_seat(certified(Chain.founded(founding(known)), by=HEIR), by=HEIR)
    later = succession(naming(heir=OTHER, height=10**6), key_of(3), height=10**6)
    more = founding(known.with_statements((), (), [later]))
    assert more.statement == later.id
    assert anyio.run(followed, own, founding(known), more).standing == own.standing


def test_an_heir_is_followed_by_the_heir_that_it_has_named() -> None:
    first = inherited(line(heir(height=1)), 1)
    said = naming(HEIR, OTHER, height=9, of=first.id)
    second = succession(said, key_of(3), of=first.id, height=9, committee=lone(OTHER))
    for order in permutations([first, second]):  # alone, the second one continues nothing that is known
        known = KNOWN.with_statements((), (), order)
        assert founding(known).statement == second.id
        assert known == KNOWN.with_statements((), (), [first]).with_statements((), (), [second])
    assert KNOWN.with_statements((), (), [second]) == KNOWN
    known = KNOWN.with_statements((), (), [first, second])
    chain = anyio.run(followed, line(heir(height=1)), founding(KNOWN), founding(known))
    assert chain.statement == second.id
    own = line(heir(height=1), heir(OTHER, height=2))  # the first one was no heir any more, so the second one is none
    assert anyio.run(followed, own, founding(KNOWN), founding(known)).standing == own.standing
    by_another = succession(naming(HOLDER, OTHER, height=9, of=first.id), key_of(3), of=first.id, height=9)
    with pytest.raises(DataError, match="not named by the only seat"):
        KNOWN.with_statements((), (), [first, by_another])


def test_an_heir_that_signs_many_lines_displaces_no_line() -> None:
    first = [succession(naming(height=5), height=height) for height in (10, 11)]
    known = KNOWN.with_statements((), (), first)
    for height in range(12, 40):
        known = known.with_statements((), (), [succession(naming(height=5), height=height)])
    assert set(known.successors(STAGE, FIRST.id)) == set(first)
    heirs = [identity_of(number) for number in range(10, 30)]
    for each in heirs:
        known = known.with_statements((), (), [succession(naming(heir=each, height=6), key_of(each_number(each)))])
    kept = known.successors(STAGE, FIRST.id)
    assert len(kept) == KEPT_HEIRS
    assert set(first) <= set(kept)


def each_number(identity: NodeIdentity) -> int:
    return next(number for number in range(64) if key_of(number).wallet_id == identity.wallet_id)


def test_a_newcomer_follows_the_heir_whose_line_its_invitation_names() -> None:
    signed = inherited(line(heir(height=1)), 1)
    known = KNOWN.with_statements((), (), [signed])
    tip = InvitedTip(STAGE, 1, bytes.fromhex(signed.id))
    later = succession(naming(heir=OTHER, height=50), key_of(3), height=50)
    more = known.with_statements((), (), [later])
    assert founding(more).statement == later.id
    found = RunVersions(OFFER, more, tip).founding_of(STAGE)
    assert found is not None
    assert found.statement == signed.id


def test_the_tip_of_an_heirs_line_is_not_replaced_by_the_statement_that_it_continues(tmp_path: Path) -> None:
    signed = inherited(line(heir(height=1)), 1)
    known = KNOWN.with_statements((), (), [signed])
    StoredFoundations(tmp_path).write(OFFER, known)
    tip = verified_tip(tmp_path, OFFER, HEIR.wallet_id)
    assert tip is not None
    assert tip.foundation.hex() == signed.id
    assert KNOWN.lacks(tip)
    assert not known.lacks(tip)
    assert not founded(lone(OTHER), lone(OTHER), before=KNOWN).lacks(tip)  # the owner's next word


def test_the_heir_certifies_the_next_steps_alone() -> None:
    signed = inherited(line(None, heir(height=2)), 2)
    chain = Chain.founded(founding(KNOWN.with_statements((), (), [signed])))
    chain = certified(certified(chain, by=HEIR), by=HEIR)
    assert chain.standing.height == signed.succession.start.height + 2
    with pytest.raises(ChainError, match="too few votes"):
        certified(chain, by=HOLDER)
    newcomer = Chain.founded(founding(KNOWN.with_statements((), (), [signed])))
    assert newcomer.proven(chain.proof()).standing == chain.standing
