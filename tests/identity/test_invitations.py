"""The code of an invitation, its forms, its limits, and every reason against one."""

from __future__ import annotations

import json
import re
import tracemalloc
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from random import Random

import msgspec
import pytest
from blake3 import blake3

from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.invitations import (
    LINK,
    MAX_CODE_CHARACTERS,
    MAX_TIP_HEIGHT,
    Invitation,
    InvitationError,
    InvitationTerms,
    InvitedModel,
    InvitedPlaces,
    InvitedTip,
    MemberPass,
    invite,
    invite_as_guest,
    read_invitation,
    to_code,
)
from neuroshard.runs.invitation_making import qr_rows
from neuroshard.types import RunId
from tests.worlds.claims import identity_of

NOW = 1_800_000_000.0
DAY = 86_400.0
SEED = bytes(range(32))
OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
RUN = RunId("ab" * 32)
ID = identity_of(1).node_id
PLACES = InvitedPlaces("friends", (f"/ip4/203.0.113.7/tcp/4001/p2p/{ID}",), ("https://data.example.org/set",))
THREE = InvitedPlaces("friends", PLACES.peers * 3, PLACES.data, model=InvitedModel(10**9, 1, 4000))
VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "invitation.json").read_text("utf-8"))
DAMAGES = 100_000
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


TIP = InvitedTip(3, 2, b"\xaa" * 32, 1024, b"\xbb" * 32)
LARGEST_TIP = InvitedTip(4096, 65_535, b"\xaa" * 32, MAX_TIP_HEIGHT, b"\xbb" * 32)


def made(
    *,
    uses: int = 1,
    label: str = "Ada",
    may_invite: bool = False,
    places: InvitedPlaces = PLACES,
    tip: InvitedTip | None = None,
) -> Invitation:
    return invite(OWNER, RUN, InvitationTerms(NOW + 7 * DAY, uses, label, may_invite, tip), places, seed=SEED)


def test_the_golden_code_is_read_for_ever() -> None:
    invitation = read_invitation(VECTOR["code"])
    assert to_code(invitation) == VECTOR["code"]
    invitation.check(RUN, OWNER.public_key, VECTOR["not_after"])
    grant = invitation.grant
    assert (grant.label, grant.uses, grant.may_invite, grant.not_after) == ("Ada", 2, True, VECTOR["not_after"])
    assert invitation.secret.hex() == VECTOR["secret"]
    assert (invitation.name, invitation.peers, invitation.data) == (PLACES.name, PLACES.peers, PLACES.data)
    member_pass = MemberPass.read(bytes.fromhex(VECTOR["pass"]))
    member_pass.verify(RUN, OWNER.public_key)
    assert member_pass.encoded == invitation.pass_for(OWNER.public_key, VECTOR["issued_at"])  # Ed25519 is deterministic
    assert invitation.tip is member_pass.tip is None  # the code is of a version without tips


def test_the_golden_code_with_a_tip_is_read_for_ever() -> None:
    invitation = read_invitation(VECTOR["code_with_tip"])
    invitation.check(RUN, OWNER.public_key, VECTOR["not_after"])
    assert to_code(invitation) == VECTOR["code_with_tip"]
    assert invitation.tip == TIP
    member_pass = MemberPass.read(invitation.pass_for(OWNER.public_key, VECTOR["issued_at"]))
    member_pass.verify(RUN, OWNER.public_key)
    assert member_pass.tip == TIP


def test_nobody_can_change_the_tip_of_an_invitation_or_take_it_out() -> None:
    invitation = made(tip=TIP)
    for tip in (None, msgspec.structs.replace(TIP, height=0), msgspec.structs.replace(TIP, epoch=1)):
        body = msgspec.msgpack.encode(msgspec.structs.replace(invitation.grant, tip=tip))
        grant = msgspec.structs.replace(invitation.signed_grant, body=body)
        changed = read_invitation(to_code(msgspec.structs.replace(invitation, signed_grant=grant)))
        with pytest.raises(InvitationError, match="not signed by the owner"):
            changed.check(RUN, OWNER.public_key, NOW)


@pytest.mark.parametrize(
    "tip",
    [(0, 0, b"a" * 31), (-1, 0, b"a" * 32), (0, 1 << 16, b"a" * 32), (0, 0, b"a" * 32, 128, b"v" * 33), (0, 0), b"a"],
)
def test_a_malformed_tip_makes_the_invitation_unreadable(tip: object) -> None:
    body = msgspec.msgpack.encode([*msgspec.msgpack.decode(made().signed_grant.body)[:8], tip])
    grant = msgspec.structs.replace(made().signed_grant, body=body)
    with pytest.raises(InvitationError, match="a form that this program does not know"):
        read_invitation(coded(b"\1" + msgspec.msgpack.encode(msgspec.structs.replace(made(), signed_grant=grant))))


def test_a_guests_tip_counts_before_the_one_of_its_own_invitation() -> None:
    parent = made(uses=3, may_invite=True, tip=TIP)
    newer = msgspec.structs.replace(TIP, height=2048)
    assert guest_of(parent, InvitationTerms(NOW + DAY, tip=newer)).tip == newer
    assert guest_of(parent, InvitationTerms(NOW + DAY)).tip == TIP


@pytest.mark.parametrize("label", ["Ada", "\u00c4" * 40], ids=["a short label", "the longest label"])
def test_links_passes_and_qr_codes_have_room_for_a_tip(label: str) -> None:
    """The largest tip, three addresses, a place of the data and a guest's two grants."""
    parent = made(uses=9999, label=label, may_invite=True, places=THREE, tip=LARGEST_TIP)
    guest = guest_of(parent, InvitationTerms(NOW + DAY, 999, label, tip=LARGEST_TIP), THREE)
    for invitation in (parent, guest):
        link = LINK + to_code(invitation)
        assert read_invitation(link) == invitation
        MemberPass.read(invitation.pass_for(OWNER.public_key, NOW)).verify(RUN, OWNER.public_key)
        assert len(qr_rows(link)) <= 4 * 30 + 17  # modules of version 30, which phones read from a screen
    assert len(to_code(made(places=THREE, tip=TIP))) - len(to_code(made(places=THREE))) <= 110


@pytest.mark.parametrize("form", ["{}", "neuroshard://join/{}", "https://host.example/join#{}", "  {}\n"])
def test_all_forms_of_a_code_give_the_same_invitation(form: str) -> None:
    code = to_code(made())
    assert to_code(read_invitation(form.format(code))) == code


def test_every_damage_of_one_character_is_found() -> None:
    code, random = to_code(made(may_invite=True, uses=3)), Random(1)
    for _ in range(DAMAGES):
        place = random.randrange(len(code))
        letter = random.choice(ALPHABET)
        damaged = random.choice([code[:place] + letter + code[place + 1 :], code[:place] + code[place + 1 :]])
        if damaged == code:
            continue
        with pytest.raises(InvitationError, match=r"damaged.*Copy all of it"):
            read_invitation(damaged)


def test_a_cut_or_joined_code_is_damaged() -> None:
    code = to_code(made())
    for text in (code[:40], code[40:], code + "A", code[:-1], code.replace(code[5], "é", 1)):
        with pytest.raises(InvitationError, match="damaged"):
            read_invitation(text)


@pytest.mark.parametrize("text", ["", " \n"])
def test_no_code_is_not_called_damaged(text: str) -> None:
    with pytest.raises(InvitationError, match=r"There is no invitation\. Paste"):
        read_invitation(text)


@pytest.mark.parametrize(
    "text", ["hello", "javascript:alert(1)", "file:///etc/passwd", "neuroshard://run/abc", "a " * 50]
)
def test_another_text_is_not_called_damaged(text: str) -> None:
    with pytest.raises(InvitationError, match=r"This text is not an invitation\. Paste"):
        read_invitation(text)


def coded(content: bytes) -> str:
    return urlsafe_b64encode(content + blake3(content).digest(4)).rstrip(b"=").decode()


def content_of(code: str) -> bytes:
    return urlsafe_b64decode(code + "=" * (-len(code) % 4))[:-4]


def test_another_version_asks_for_an_update() -> None:
    with pytest.raises(InvitationError, match=r"version 2, .*Update NeuroShard first"):
        read_invitation(coded(b"\2" + content_of(to_code(made()))[1:]))
    fields = [*msgspec.msgpack.decode(content_of(to_code(made()))[1:]), 1]
    with pytest.raises(InvitationError, match="Update NeuroShard first"):  # a field that this version does not know
        read_invitation(coded(b"\1" + msgspec.msgpack.encode(fields)))


def test_a_long_text_is_refused_before_it_is_decoded() -> None:
    tracemalloc.start()
    for text in ("A" * (MAX_CODE_CHARACTERS + 1), "A" * 10_000_000):
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with pytest.raises(InvitationError, match=f"{len(text)} characters; at most 1600"):
            read_invitation(text)
        assert tracemalloc.get_traced_memory()[1] - before < 100_000
    tracemalloc.stop()


def test_an_invitation_that_would_be_too_long_is_not_made() -> None:
    peers = tuple(f"/dns/{'a' * 60}.{'b' * 60}.example.org/tcp/4001/p2p/{ID}" for _ in range(3))
    data = (f"https://example.org/{'x' * 230}",) * 2
    with pytest.raises(InvitationError, match="at most 1600"):
        to_code(made(places=InvitedPlaces("friends", peers, data)))
    assert len(to_code(made(places=InvitedPlaces("f" * 90, peers)))) <= MAX_CODE_CHARACTERS


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (InvitedPlaces("a", ("/ip4/203.0.113.7/tcp/4001",)), "address that cannot be used"),
        (InvitedPlaces("a", (), ("http://data.example.org",)), "data that does not start with https://"),
        (InvitedPlaces("a", (), ("file:///etc",)), "data that does not start with https://"),
        (InvitedPlaces("a", (), (), "http://127.0.0.1:8000"), "organiser that does not start with https://"),
    ],
)
def test_places_that_are_not_possible_are_refused_when_read(places: InvitedPlaces, reason: str) -> None:
    with pytest.raises(InvitationError, match=reason):
        read_invitation(coded(b"\1" + msgspec.msgpack.encode(made(places=places))))
    with pytest.raises(InvitationError, match=reason):
        to_code(made(places=places))


@pytest.mark.parametrize(
    "terms", [InvitationTerms(NOW, 0), InvitationTerms(NOW, 10_001), InvitationTerms(NOW, 1, "a\n")]
)
def test_impossible_terms_are_refused(terms: InvitationTerms) -> None:
    with pytest.raises(InvitationError, match="cannot have these terms"):
        invite(OWNER, RUN, terms, PLACES, seed=SEED)


def test_an_expired_invitation_names_its_date() -> None:
    invitation = made()
    invitation.check(RUN, OWNER.public_key, NOW + 7 * DAY + 299)
    with pytest.raises(InvitationError, match=r"expired on 2027-01-22 08:00 UTC\. Ask for a new invitation"):
        invitation.check(RUN, OWNER.public_key, NOW + 7 * DAY + 301)


def test_an_invitation_to_another_run_is_refused() -> None:
    with pytest.raises(InvitationError, match=r"for another run.* serve run cdcd"):
        made().check(RunId("cd" * 32), OWNER.public_key, NOW)
    thief = Wallet.from_secret(TokenSecret("hex", b"\1" * 32))
    forged = invite(thief, RUN, InvitationTerms(NOW + DAY), PLACES, seed=SEED)
    with pytest.raises(InvitationError, match="for another run"):
        forged.check(RUN, OWNER.public_key, NOW)
    renamed = msgspec.structs.replace(forged.grant, owner=OWNER.public_key)
    stolen = msgspec.structs.replace(
        forged, signed_grant=msgspec.structs.replace(forged.signed_grant, body=msgspec.msgpack.encode(renamed))
    )
    with pytest.raises(InvitationError, match="not signed by the owner"):
        stolen.check(RUN, OWNER.public_key, NOW)


def guest_of(parent: Invitation, terms: InvitationTerms, places: InvitedPlaces = PLACES) -> Invitation:
    member_pass = MemberPass.read(parent.pass_for(identity_of(1).delegation.grant.wallet_public_key, NOW))
    return invite_as_guest(member_pass, parent.secret, terms, places, seed=b"\2" * 32)


def test_a_guest_invites_with_fewer_uses_and_no_later_end() -> None:
    parent = made(uses=3, may_invite=True)
    guest = guest_of(parent, InvitationTerms(NOW + DAY, 2, "Bo"))
    read_invitation(to_code(guest)).check(RUN, OWNER.public_key, NOW)
    for terms in (InvitationTerms(NOW + DAY, 3), InvitationTerms(NOW + 8 * DAY, 1)):
        with pytest.raises(InvitationError, match="more uses than"):
            guest_of(parent, terms)
    with pytest.raises(InvitationError, match="may not invite"):
        guest_of(parent, InvitationTerms(NOW + DAY, 1, may_invite=True))
    with pytest.raises(InvitationError, match="may not invite"):
        guest_of(made(uses=3), InvitationTerms(NOW + DAY))
    with pytest.raises(InvitationError, match="cannot invite"):
        guest_of(guest, InvitationTerms(NOW + DAY, 1))


def test_no_text_shows_the_secret() -> None:
    invitation = made()
    assert repr(invitation) == str(invitation) == f"Invitation('Ada', {invitation.grant.invitation.hex()[:8]})"
    assert not re.search(invitation.secret.hex(), repr([invitation]))


def test_random_content_is_read_or_refused_with_a_sentence() -> None:
    random, good = Random(2), content_of(to_code(made(may_invite=True)))
    actions: list[str] = []
    for _ in range(3000):
        content = bytearray(good if random.random() < 0.7 else random.randbytes(random.randrange(1, 200)))
        for _ in range(random.randrange(1, 4)):
            content[random.randrange(len(content))] = random.randrange(256)
        try:
            read_invitation(coded(bytes(content))).check(RUN, OWNER.public_key, NOW)
        except InvitationError as error:
            actions.append(error.action)
    assert len(actions) > 1000
    assert all(actions)
