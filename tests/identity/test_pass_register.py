"""The wallets of a run of friends: expired, foreign, revoked and over-used passes are refused."""

from __future__ import annotations

from contextlib import suppress
from itertools import count, permutations

import msgspec
import pytest

from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.invitations import (
    Invitation,
    InvitationError,
    InvitationTerms,
    InvitedPlaces,
    MemberPass,
    invite,
    invite_as_guest,
    sign_revocation,
)
from neuroshard.identity.pass_register import MAX_EXCESS, PassRegister
from neuroshard.types import RunId

NOW = 1_800_000_000.0
DAY = 86_400.0
SEEDS = (number.to_bytes(32, "big") for number in count(1))
RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
NOWHERE = InvitedPlaces("friends")


def wallet(number: int) -> Wallet:
    return Wallet.from_secret(TokenSecret("hex", number.to_bytes(32, "big")))


OWNER = wallet(0)


def made(*, uses: int = 1, may_invite: bool = False, run: RunId = RUN, owner: Wallet = OWNER) -> Invitation:
    return invite(owner, run, InvitationTerms(NOW + 7 * DAY, uses, "Ada", may_invite), NOWHERE, seed=next(SEEDS))


def register() -> PassRegister:
    return PassRegister(RUN, OWNER.public_key)


def shown(invitation: Invitation, number: int, now: float = NOW) -> bytes:
    return invitation.pass_for(wallet(number).public_key, now)


def test_the_owner_and_wallets_with_a_pass_are_members() -> None:
    members = register()
    assert members.refusal(OWNER.wallet_id) == ""
    assert "Ask the owner of the run for an invitation" in members.refusal(wallet(1).wallet_id)
    member_pass = members.admit(shown(made(), 1), NOW)
    assert (member_pass.label, members.refusal(wallet(1).wallet_id)) == ("Ada", "")
    assert members.refusal(wallet(2).wallet_id)


def test_an_invitation_admits_as_many_wallets_as_it_has_uses() -> None:
    members, invitation = register(), made(uses=2)
    for number in (1, 2, 1):  # showing a pass again uses nothing
        members.admit(shown(invitation, number), NOW)
    for is_vouched in (False, True):
        with pytest.raises(InvitationError, match="used up: it was for 2 wallets"):
            members.admit(shown(invitation, 3), NOW, is_vouched=is_vouched)
    assert members.refusal(wallet(3).wallet_id)


def test_a_pass_is_first_shown_before_its_invitation_ends() -> None:
    invitation = made(uses=3)
    members, late = register(), shown(invitation, 1)
    members.admit(late, NOW + 7 * DAY + 299)
    assert members.admit(late, NOW + 70 * DAY).wallet_id == wallet(1).wallet_id  # a known one stays
    with pytest.raises(InvitationError, match="expired on 2027-01-22"):
        register().admit(late, NOW + 7 * DAY + 301)
    register().admit(late, NOW + 70 * DAY, is_vouched=True)  # a member knows it from earlier
    with pytest.raises(InvitationError, match="made after its invitation ended"):
        register().admit(shown(invitation, 1, NOW + 7 * DAY + 301), NOW + 70 * DAY, is_vouched=True)
    with pytest.raises(InvitationError, match="dated in the future"):
        register().admit(shown(invitation, 1, NOW + 301), NOW)


@pytest.mark.parametrize("invitation", [made(run=OTHER_RUN), made(owner=wallet(9))])
def test_a_pass_of_another_run_or_owner_is_refused(invitation: Invitation) -> None:
    with pytest.raises(InvitationError, match="another run"):
        register().admit(shown(invitation, 1), NOW)


def test_a_pass_cannot_be_moved_to_another_wallet_or_changed() -> None:
    member_pass = MemberPass.read(shown(made(), 1))
    stolen = msgspec.structs.replace(member_pass.statement, wallet=wallet(2).public_key)
    signed = msgspec.structs.replace(member_pass.signed, body=msgspec.msgpack.encode(stolen))
    with pytest.raises(InvitationError, match="not signed with the key"):
        register().admit(msgspec.msgpack.encode(signed), NOW)
    for data in (b"", member_pass.encoded[:-1], member_pass.encoded + b"\0", b"\x92" * 5000, b"\xc4" * 900):
        with pytest.raises(InvitationError):
            register().admit(data, NOW)


def test_a_revocation_ends_the_passes_of_an_invitation_and_of_its_guests() -> None:
    members, invitation = register(), made(uses=5, may_invite=True)
    host = members.admit(shown(invitation, 1), NOW)
    guest = invite_as_guest(host, invitation.secret, InvitationTerms(NOW + DAY, 2, "Bo"), NOWHERE, seed=next(SEEDS))
    members.admit(shown(guest, 2), NOW)
    revocation = sign_revocation(OWNER, RUN, invitation.grant.invitation, NOW)
    assert [members.revoke(revocation), members.revoke(revocation)] == [True, False]
    for number in (1, 2):
        assert "revoked" in members.refusal(wallet(number).wallet_id)
    assert (members.passes(), members.revocations()) == ((), (revocation,))
    with pytest.raises(InvitationError, match="revoked"):
        members.admit(shown(invitation, 3), NOW)
    members.admit(shown(made(), 1), NOW)  # another invitation admits the wallet again
    assert members.refusal(wallet(1).wallet_id) == ""


def test_a_removed_wallet_stays_outside_and_the_others_of_its_invitation_stay() -> None:
    members, invitation = register(), made(uses=5)
    for number in (1, 2):
        members.admit(shown(invitation, number), NOW)
    gone, stays = wallet(1).wallet_id, wallet(2).wallet_id
    members.revoke(sign_revocation(OWNER, RUN, wallet(1).public_key, NOW))
    assert "revoked" in members.refusal(gone)
    assert (members.refusal(stays), members.is_removed(gone), members.is_removed(stays)) == ("", True, False)
    with pytest.raises(InvitationError, match="revoked"):
        members.admit(shown(made(), 1), NOW)
    again = register()  # after a restart the pass is not known any more
    again.revoke(members.revocations()[0])
    assert again.is_removed(gone)


def test_only_the_owner_revokes() -> None:
    key = made().grant.invitation
    for false in (sign_revocation(wallet(1), RUN, key, NOW), sign_revocation(OWNER, OTHER_RUN, key, NOW), b"", b"x"):
        with pytest.raises(InvitationError):
            register().revoke(false)


def test_guests_of_a_guest_use_up_the_first_invitation_too() -> None:
    members, invitation = register(), made(uses=3, may_invite=True)
    host = MemberPass.read(shown(invitation, 1))
    for number in (2, 3):
        guest = invite_as_guest(host, invitation.secret, InvitationTerms(NOW + DAY, 2), NOWHERE, seed=next(SEEDS))
        members.admit(shown(guest, number), NOW)
    members.admit(host.encoded, NOW)
    another = invite_as_guest(host, invitation.secret, InvitationTerms(NOW + DAY, 2), NOWHERE, seed=next(SEEDS))
    with pytest.raises(InvitationError, match="used up: it was for 3 wallets"):
        members.admit(shown(another, 4), NOW)


def places_void(members: PassRegister, *passes: bytes) -> None:
    for each in passes:
        assert members.revoke(sign_revocation(OWNER, RUN, MemberPass.read(each).place, NOW))


def test_the_owners_word_about_a_place_frees_it_for_the_wallet_that_has_it() -> None:
    invitation, members = made(uses=2), register()
    first, second, third = (shown(invitation, number) for number in (1, 2, 3))
    for each in (first, third):
        members.admit(each, NOW)
    with pytest.raises(InvitationError, match="used up"):
        members.admit(second, NOW, is_vouched=True)
    assert [each.encoded for each in members.excess] == [second]
    places_void(members, third)
    assert members.pass_of(wallet(2).wallet_id) is not None  # at once: it need not be shown again
    assert members.excess == ()
    assert "saw another wallet with it first" in members.refusal(wallet(3).wallet_id)
    with pytest.raises(InvitationError, match="saw another wallet with it first"):
        members.admit(shown(invitation, 3, NOW + 1), NOW)  # another pass for the same place
    assert members.admit(shown(made(), 3), NOW).wallet_id == wallet(3).wallet_id  # another invitation


def test_members_with_the_same_words_of_the_owner_agree_in_every_order() -> None:
    invitation = made(uses=2)
    passes = [shown(invitation, number) for number in range(1, 5)]
    expected = {MemberPass.read(each).wallet_id for each in passes[:2]}
    for order in permutations(passes):
        members = register()
        for each in order:
            with suppress(InvitationError):
                members.admit(each, NOW, is_vouched=True)
        places_void(members, *passes[2:])
        assert {each.wallet_id for each in members.passes()} == expected
        assert members.excess == ()


def test_a_guests_void_place_is_free_in_the_invitation_of_its_host_as_well() -> None:
    parent = made(uses=2, may_invite=True)
    members, host = register(), shown(parent, 1)
    members.admit(host, NOW)
    guests = invite_as_guest(
        MemberPass.read(host), parent.secret, InvitationTerms(NOW + DAY), NOWHERE, seed=next(SEEDS)
    )
    members.admit(shown(guests, 2), NOW)
    with pytest.raises(InvitationError, match="used up: it was for 2 wallets"):
        members.admit(shown(parent, 3), NOW)
    places_void(members, shown(guests, 2))
    members.admit(shown(parent, 3), NOW)


def test_only_what_members_vouch_for_waits_for_the_owner_and_only_so_many() -> None:
    invitation, members = made(), register()
    members.admit(shown(invitation, 1), NOW)
    for number in range(2, 3 * MAX_EXCESS):
        for is_vouched in (False, True):
            before = len(members.excess)
            with pytest.raises(InvitationError, match="used up"):
                members.admit(shown(invitation, number), NOW, is_vouched=is_vouched)
            assert len(members.excess) == before or is_vouched
    assert len(members.excess) == MAX_EXCESS
