"""Foundations: the owner and its deputies sign them; two of one epoch stop everybody until a third names both."""

from __future__ import annotations

from contextlib import suppress
from itertools import permutations

import msgspec
import pytest

from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.foundation import (
    Foundation,
    FoundationError,
    Foundations,
    SignedFoundation,
    StageStart,
    epoch_parent,
)
from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.signing import SignatureError
from neuroshard.types import NodeId, RunId, WalletId

RUN = RunId("1" * 64)
OWNER, DEPUTY, STRANGER = (Wallet.from_secret(TokenSecret("hex", bytes([number] * 32))) for number in (1, 2, 3))
EMPTY = Foundations(RUN, OWNER.public_key)


def start(stage: int = 0, height: int = 0) -> StageStart:
    return StageStart(stage, Committee.founded([Seat(WalletId("w"), NodeId("n"), 0)], is_open=False), height)


def statement(
    signer: Wallet = OWNER,
    before: SignedFoundation | None = None,
    *,
    stage: int = 0,
    height: int = 0,
    contradictions: tuple[str, ...] = (),
    run_id: RunId = RUN,
    deputies: tuple[Wallet, ...] = (DEPUTY,),
) -> SignedFoundation:
    foundation = Foundation(
        run_id,
        0 if before is None else before.foundation.epoch + 1,
        (start(stage, height),),
        None if before is None else before.id,
        contradictions,
        tuple(each.public_key for each in deputies),
    )
    return SignedFoundation.sign(signer, foundation)


FIRST = statement()


def test_the_newest_statement_about_a_stage_applies_and_the_others_continue() -> None:
    second = statement(before=FIRST, stage=1)
    known = EMPTY.with_statements([FIRST, second])
    assert known.current == second
    for stage, expected in ((0, FIRST), (1, second)):
        found = known.start_of(stage)
        assert found is not None
        assert found[0] == expected
    assert known.start_of(2) is None


def test_the_order_of_arrival_does_not_matter() -> None:
    second = statement(DEPUTY, FIRST)
    third = statement(before=second, height=7)
    for order in permutations([FIRST, second, third]):
        known = EMPTY.with_statements(order)
        assert known.current == third


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (statement(STRANGER, stage=4), "neither by the run's owner"),
        (statement(DEPUTY, stage=4), "neither by the run's owner"),
        (statement(STRANGER, FIRST), "neither by the run's owner"),
        (statement(run_id=RunId("2" * 64)), "is of run"),
        (statement(before=statement(stage=3)), "before epoch 1 is not known"),
    ],
)
def test_what_is_not_a_statement_of_the_run_is_refused(bad: SignedFoundation, reason: str) -> None:
    with pytest.raises(FoundationError, match=reason):
        EMPTY.with_statements([FIRST, bad])


def test_a_signature_for_other_bytes_is_refused() -> None:
    forged = SignedFoundation(
        msgspec.structs.replace(FIRST.signed, body=statement(stage=5).signed.body), OWNER.public_key
    )
    with pytest.raises(SignatureError):
        EMPTY.with_statements([forged])


def test_two_statements_of_one_epoch_stop_the_run_until_a_third_names_both() -> None:
    """Owner and deputy, without a connection, both found epoch 1."""
    by_owner, by_deputy = statement(before=FIRST), statement(DEPUTY, FIRST, stage=1)
    known = EMPTY.with_statements([FIRST, by_owner, by_deputy])
    assert known.current is None
    assert len(known.highest) == 2
    assert known.start_of(0) is None
    with pytest.raises(FoundationError, match="does not name all of them"):
        known.with_statements([statement(before=by_owner)])
    both = statement(before=by_owner, contradictions=(by_deputy.id,))
    assert known.with_statements([both]).current == both


def test_the_owners_word_ends_the_statements_of_a_deputy_in_every_order() -> None:
    """The owner trusts nobody from epoch 1 on. The deputy, without a connection, has founded epochs 1 and 2."""
    ended = statement(before=FIRST, deputies=())
    rival = statement(DEPUTY, FIRST, stage=1)
    for order in permutations([ended, rival, statement(DEPUTY, rival, stage=2)]):
        known = EMPTY.with_statements([FIRST])
        for each in order:
            with suppress(FoundationError):  # its predecessor is not known
                known = known.with_statements([each])
        assert known.known.keys() == {FIRST.id, ended.id}
        assert known.current == ended
        assert not known.may_sign(DEPUTY.public_key)
        with pytest.raises(FoundationError, match="neither by the run's owner"):
            known.with_statements([statement(DEPUTY, ended)])


def test_a_deputys_statement_stays_valid_if_the_owner_continues_from_it() -> None:
    by_deputy = statement(DEPUTY, FIRST, height=5)
    known = EMPTY.with_statements([FIRST, by_deputy])
    later = known.next(OWNER, (), ())
    known = known.with_statements([later])
    assert known.current == later
    found = known.start_of(0)
    assert found is not None
    assert found[0] == by_deputy
    with pytest.raises(FoundationError, match="below height 5"):
        known.with_statements([statement(before=later, height=4, deputies=())])


def test_a_deputy_names_nobody_and_does_not_decide_against_the_owner() -> None:
    with pytest.raises(FoundationError, match="names other deputies"):
        EMPTY.with_statements([FIRST, statement(DEPUTY, FIRST, deputies=(DEPUTY, STRANGER))])
    by_owner, by_deputy = statement(before=FIRST), statement(DEPUTY, FIRST, stage=1)
    known = EMPTY.with_statements([FIRST, by_owner, by_deputy])
    with pytest.raises(FoundationError, match="continues from another one than the owner's"):
        known.with_statements([statement(DEPUTY, by_deputy, contradictions=(by_owner.id,))])
    decided = known.next(DEPUTY, (start(),))
    assert decided.foundation.previous == by_owner.id
    assert known.with_statements([decided]).current == decided


def test_two_lists_that_the_owner_signs_on_two_computers_do_not_stop_the_run() -> None:
    """Both name wallets, from the same statement on. No chain depends on which of them a node knows."""
    known = EMPTY.with_statements([FIRST])
    lists = [known.next(OWNER, (), trusted=(WalletId(digit * 32),)) for digit in "ab"]
    later = known.with_statements(lists[:1]).next(OWNER, (), trusted=(WalletId("c" * 32),))
    for order in permutations([*lists, later]):
        one_by_one = known
        for each in order:
            with suppress(FoundationError):  # its predecessor is not known
                one_by_one = one_by_one.with_statements([each])
        assert one_by_one.current == (later if later.id in one_by_one.known else min(lists, key=lambda one: one.id))
        assert one_by_one.start_of(0) == known.start_of(0)
        assert known.with_statements(order).current == later
    both = known.with_statements(lists)
    assert both.word == both.current
    assert both.trusted in {("a" * 32,), ("b" * 32,)}
    rival = statement(DEPUTY, FIRST, deputies=(DEPUTY,))
    assert both.with_statements([rival]).is_contradictory
    other_line = statement(before=FIRST)
    assert known.with_statements([*lists, other_line]).is_contradictory


def test_a_deputy_changes_no_list_of_wallets() -> None:
    known = EMPTY.with_statements([FIRST])
    known = known.with_statements([known.next(OWNER, (), trusted=(WalletId("a" * 32),))])
    with pytest.raises(FoundationError, match="names other deputies or wallets"):
        known.with_statements([known.next(DEPUTY, (start(),), trusted=(WalletId("b" * 32),))])
    by_deputy = known.next(DEPUTY, (start(),))
    after = known.with_statements([by_deputy])
    assert (after.current, after.word, after.trusted) == (by_deputy, known.current, ("a" * 32,))


def test_a_statement_does_not_go_below_an_earlier_start() -> None:
    second = statement(before=FIRST, height=9)
    with pytest.raises(FoundationError, match="below height 9"):
        EMPTY.with_statements([FIRST, second, statement(before=second, height=8)])


def test_epochs_and_stages_have_their_own_first_parents() -> None:
    parents = {epoch_parent(each.id, stage) for each in (FIRST, statement(before=FIRST)) for stage in range(2)}
    assert len(parents) == 4
