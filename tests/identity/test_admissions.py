"""Admissions to an organised run: only live ones of its authorities count, and a dead organiser ends nobody's work."""

from __future__ import annotations

import msgspec
import pytest

from neuroshard.identity import NodeKey, TokenSecret, Wallet
from neuroshard.identity.admissions import (
    ADMISSION_GRACE_SECONDS,
    ADMISSION_SECONDS,
    DOWNLOAD_RIGHT_SECONDS,
    MAX_ADMISSION_BYTES,
    RETURN_SECONDS,
    Admission,
    AdmissionError,
    AdmissionRegister,
    AdmissionRevocation,
    DownloadRight,
    JoinClaim,
    read_admission,
    sign_admission,
    sign_admission_revocation,
    sign_download_right,
)
from neuroshard.identity.signing import SigningKey
from neuroshard.types import LayerRange, NodeId, RunId

NOW = 1_800_000_000
HOUR = 3600
RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
AUTHORITY, SECOND, STRANGER = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
WALLET = Wallet.from_secret(TokenSecret("hex", bytes(31) + b"\1")).wallet_id
NODE, OTHER = (NodeKey.from_seed(bytes([number]) * 32).node_id for number in (7, 8))


def admission(node: NodeId = NODE, at: int = NOW, run: RunId = RUN, seconds: int = ADMISSION_SECONDS) -> Admission:
    return Admission(run, node, WALLET, "body-0", LayerRange(2, 4), 1, at, at + seconds)


def right(at: int = NOW, run: RunId = RUN, seconds: int = DOWNLOAD_RIGHT_SECONDS) -> DownloadRight:
    return DownloadRight(run, NODE, WALLET, "body-0", LayerRange(2, 4), at, at + seconds)


def register(*authorities: SigningKey) -> AdmissionRegister:
    keys = [key.public_key for key in authorities or (AUTHORITY,)]
    return AdmissionRegister(RUN, lambda: keys)


def test_an_admitted_node_may_take_part_for_an_hour() -> None:
    members = register()
    assert "has not shown an admission" in members.refusal(NODE, WALLET, NOW)
    members.admit(sign_admission(AUTHORITY, admission()), NOW)
    assert [members.refusal(NODE, WALLET, NOW + second) for second in (0, HOUR)] == ["", ""]
    assert "has not shown" in members.refusal(OTHER, WALLET, NOW)


def test_the_admission_of_a_node_counts_for_its_own_wallet_only() -> None:
    members = register()
    members.admit(sign_admission(AUTHORITY, admission()), NOW)
    other = Wallet.from_secret(TokenSecret("hex", bytes(31) + b"\2")).wallet_id
    assert "has not shown" in members.refusal(NODE, other, NOW)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (sign_admission(STRANGER, admission()), "not signed by an authority"),
        (sign_admission(AUTHORITY, admission(run=OTHER_RUN)), "is for run cdcd"),
        (sign_admission(AUTHORITY, admission(seconds=HOUR + 1)), "longer than an hour"),
        (sign_admission(AUTHORITY, admission(seconds=0)), "for no time"),
        (sign_admission(AUTHORITY, admission(at=NOW + 301)), "dated in the future"),
        (sign_admission(AUTHORITY, admission(at=NOW - HOUR - 1)), "has expired"),
        (
            sign_admission_revocation(AUTHORITY, AdmissionRevocation(RUN, NODE, None, "", NOW)),
            "cannot be read: An? .*",
        ),
        (b"\xff" * 40, "cannot be read"),
        (bytes(MAX_ADMISSION_BYTES + 1), "at most 512"),
    ],
)
def test_an_admission_that_is_not_valid_now_is_refused(data: bytes, reason: str) -> None:
    members = register()
    with pytest.raises(AdmissionError, match=reason):
        members.admit(data, NOW)
    assert members.admissions() == ()


def test_a_right_to_download_counts_for_minutes_and_is_no_admission() -> None:
    members, data = register(), sign_download_right(AUTHORITY, right())
    assert [members.verify_right(data, NOW + second) for second in (0, DOWNLOAD_RIGHT_SECONDS)] == [right()] * 2
    with pytest.raises(AdmissionError, match="cannot be read"):
        members.admit(data, NOW)
    with pytest.raises(AdmissionError, match="cannot be read"):
        members.verify_right(sign_admission(AUTHORITY, admission()), NOW)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (sign_download_right(STRANGER, right()), "not signed by an authority"),
        (sign_download_right(AUTHORITY, right(run=OTHER_RUN)), "is for run cdcd"),
        (sign_download_right(AUTHORITY, right(seconds=DOWNLOAD_RIGHT_SECONDS + 1)), "longer than its time"),
        (sign_download_right(AUTHORITY, right(seconds=0)), "for no time"),
        (sign_download_right(AUTHORITY, right(at=NOW + 301)), "dated in the future"),
        (sign_download_right(AUTHORITY, right(at=NOW - DOWNLOAD_RIGHT_SECONDS - 1)), "has expired"),
    ],
)
def test_a_right_to_download_that_is_not_valid_now_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(AdmissionError, match=reason):
        register().verify_right(data, NOW)


def test_an_older_admission_does_not_replace_a_newer_one() -> None:
    members = register()
    old, new = (sign_admission(AUTHORITY, admission(at=NOW + second)) for second in (0, 1800))
    members.admit(new, NOW + 1800)
    assert members.admit(old, NOW + 1800).admitted_at == NOW + 1800
    assert members.admissions() == (new,)


def test_members_of_a_dead_organiser_work_on_for_the_grace_time() -> None:
    members = register()
    members.admit(sign_admission(AUTHORITY, admission()), NOW)
    end = NOW + HOUR
    assert members.refusal(NODE, WALLET, end + ADMISSION_GRACE_SECONDS) == ""
    assert "has expired" in members.refusal(NODE, WALLET, end + ADMISSION_GRACE_SECONDS + 1)


def test_an_expired_admission_does_not_count_once_the_organiser_has_answered() -> None:
    members = register()
    members.admit(sign_admission(AUTHORITY, admission()), NOW)
    members.admit(sign_admission(AUTHORITY, admission(OTHER, NOW + HOUR + 1)), NOW + HOUR + 1)
    late = NOW + HOUR + 1 + RETURN_SECONDS  # after the outage the node had time to refresh
    assert [members.refusal(NODE, WALLET, second) == "" for second in (late, late + 1)] == [True, False]
    assert members.refusal(OTHER, WALLET, NOW + HOUR + 1) == ""


def test_without_an_outage_an_expired_admission_ends_at_once() -> None:
    members = register()
    members.admit(sign_admission(AUTHORITY, admission()), NOW)
    for second in (HOUR // 2, HOUR + 1):
        members.admit(sign_admission(AUTHORITY, admission(OTHER, NOW + second)), NOW + second)
    assert "has expired" in members.refusal(NODE, WALLET, NOW + HOUR + 1)


def test_an_outage_does_not_bring_back_a_node_that_was_removed_before_it() -> None:
    members = register()
    members.admit(sign_admission(AUTHORITY, admission()), NOW)
    for second in (HOUR // 2, HOUR, HOUR + 60, 3 * HOUR):  # the silence begins a minute after the removed node's end
        members.admit(sign_admission(AUTHORITY, admission(OTHER, NOW + second)), NOW + second)
    assert "has expired" in members.refusal(NODE, WALLET, NOW + 3 * HOUR)


def test_stored_admissions_with_gaps_between_them_are_no_outage() -> None:
    """Only the newest admission of each node is stored, so a gap says nothing about the organiser."""
    members, late = register(), NOW + 3 * HOUR
    for node, at in ((NODE, NOW), (OTHER, late)):
        members.admit(sign_admission(AUTHORITY, admission(node, at)), late, is_stored=True)
    assert "has expired" in members.refusal(NODE, WALLET, late)
    assert members.refusal(OTHER, WALLET, late) == ""


def test_names_without_end_displace_no_live_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuroshard.identity.admissions.MAX_ADMISSIONS", 3)
    members = register()
    nodes = [NodeKey.from_seed(bytes([number]) * 32).node_id for number in range(20, 27)]
    for place, node in enumerate(nodes[:3]):
        members.admit(sign_admission(AUTHORITY, admission(node, NOW + 60 * place)), NOW + 120)
    for node in nodes[3:]:
        with pytest.raises(AdmissionError, match="the most that a node keeps"):
            members.admit(sign_admission(AUTHORITY, admission(node, NOW + 130)), NOW + 130)
    renewed = NOW + HOUR
    members.admit(sign_admission(AUTHORITY, admission(nodes[0], renewed)), renewed)
    later = NOW + HOUR + 61  # the second one has ended, and was not the first in the table
    members.admit(sign_admission(AUTHORITY, admission(nodes[3], later)), later)
    assert [members.refusal(node, WALLET, later) == "" for node in nodes[:5]] == [True, False, True, True, False]


def test_an_admission_that_is_shown_again_keeps_its_position() -> None:
    members = register()
    shown = [sign_admission(AUTHORITY, admission(node)) for node in (NODE, OTHER)]
    for data in (*shown, shown[0]):
        members.admit(data, NOW)
    assert members.admissions() == tuple(shown)


def test_a_stored_admission_is_known_from_the_time_when_it_was_live() -> None:
    late, data = NOW + 2 * HOUR, sign_admission(AUTHORITY, admission())
    again, newcomer = register(), register()
    again.admit(data, late, is_stored=True)
    assert again.refusal(NODE, WALLET, late) == ""
    with pytest.raises(AdmissionError, match="has expired"):
        newcomer.admit(data, late)


@pytest.mark.parametrize("named", ["node", "wallet"])
def test_a_revoked_node_or_wallet_is_refused_for_ever(named: str) -> None:
    members = register()
    node, wallet = (NODE, None) if named == "node" else (None, WALLET)
    data = sign_admission_revocation(AUTHORITY, AdmissionRevocation(RUN, node, wallet, "proof", NOW))
    assert [members.revoke(data), members.revoke(data)] == [True, False]
    members.admit(sign_admission(AUTHORITY, admission(at=NOW + 60)), NOW + 60)
    assert "ended the place" in members.refusal(NODE, WALLET, NOW + 60)


def test_a_revocation_of_nobody_or_by_a_stranger_is_refused() -> None:
    members = register()
    for signer, node, wallet in ((AUTHORITY, None, None), (AUTHORITY, NODE, WALLET), (STRANGER, NODE, None)):
        with pytest.raises(AdmissionError):
            members.revoke(sign_admission_revocation(signer, AdmissionRevocation(RUN, node, wallet, "", NOW)))


def test_every_authority_of_the_newest_parameters_counts() -> None:
    keys = [AUTHORITY.public_key]
    members = AdmissionRegister(RUN, lambda: keys)
    data = sign_admission(SECOND, admission())
    with pytest.raises(AdmissionError):
        members.admit(data, NOW)
    keys.append(SECOND.public_key)
    assert members.admit(data, NOW).node == NODE


def test_no_changed_byte_of_an_admission_is_accepted() -> None:
    data = sign_admission(AUTHORITY, admission())
    for place in range(len(data)):
        with pytest.raises(AdmissionError):
            read_admission(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], RUN, [AUTHORITY.public_key])


def test_the_name_in_a_join_claim_is_short_printable_text() -> None:
    assert JoinClaim(RUN, name="Ada <3").name == "Ada <3"
    with pytest.raises(ValueError, match="printable"):
        JoinClaim(RUN, name="a\u202eb")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(JoinClaim(RUN, name="n" * 33)), JoinClaim)
