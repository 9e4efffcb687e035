from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.errors import DataError
from neuroshard.identity import (
    ClaimExpiredError,
    ClaimTooLargeError,
    Delegation,
    DelegationExpiredError,
    ForeignClaimError,
    KnownDelegations,
    MalformedClaimError,
    NodeIdentity,
    NodeKey,
    SignatureError,
    SignedClaim,
    TokenSecret,
    Wallet,
    sign_claim,
    verify_claim,
    verify_signature,
)
from neuroshard.identity.claims import MAX_CLAIM_BYTES

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text("utf-8"))
NOW = 1_700_000_000.0
DAY = 86_400.0


def wallet_of(number: int) -> Wallet:
    return Wallet.from_secret(TokenSecret("hex", number.to_bytes(32, "big")))


def identity_of(wallet: int, node: int) -> NodeIdentity:
    key = NodeKey.from_seed(node.to_bytes(32, "big"))
    delegation = Delegation.issue(wallet_of(wallet), key.public_key, expires_at=NOW + DAY)
    return NodeIdentity(wallet_of(wallet).wallet_id, key.node_id, key, delegation)


def test_a_claim_survives_the_wire_and_names_its_maker() -> None:
    identity = identity_of(1, 2)
    sent = sign_claim(identity, "report", {"loss": 2.5, "step": 7}, NOW).encode()
    verified = verify_claim(SignedClaim.decode(sent), "report", NOW + 1, sender=identity.node_id)
    assert (verified.node_id, verified.wallet_id) == (identity.node_id, identity.wallet_id)
    assert verified.payload == {"loss": 2.5, "step": 7}
    assert verified.issued_at == NOW


def test_a_claim_issued_at_a_whole_number_of_seconds_verifies() -> None:
    sent = sign_claim(identity_of(1, 2), "report", None, int(NOW)).encode()
    assert verify_claim(SignedClaim.decode(sent), "report", NOW).issued_at == NOW


def test_a_claim_with_text_that_is_not_unicode_is_malformed() -> None:
    sent = sign_claim(identity_of(1, 2), "report", {"name": "Z"}, NOW).encode()
    with pytest.raises(MalformedClaimError, match="not Unicode"):
        SignedClaim.decode(sent.replace(b'"Z"', rb'"\ud800"'))


def test_the_golden_claim_verifies() -> None:
    vector = VECTORS["claim"]
    claim = SignedClaim.decode(vector["encoded"].encode())
    verified = verify_claim(claim, "announcement", vector["verified_at"])
    assert (verified.node_id, verified.wallet_id) == (vector["node_id"], vector["wallet_id"])
    assert claim.encode() == vector["encoded"].encode()


def test_a_delegation_is_checked_once_and_a_forged_one_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bytes] = []
    monkeypatch.setattr(
        "neuroshard.identity.claims.verify_signature",
        lambda key, message, signature: (checked.append(key), verify_signature(key, message, signature)),
    )
    known, identity = KnownDelegations(most=2), identity_of(1, 2)
    for payload in range(3):
        claim = sign_claim(identity, "report", payload, NOW)
        assert verify_claim(SignedClaim.decode(claim.encode()), "report", NOW, known=known).payload == payload
    assert checked.count(wallet_of(1).public_key) == 1  # the node key signs every claim, the wallet the delegation
    longer = replace(identity.delegation, expires_at=int(NOW + 2 * DAY))
    with pytest.raises(SignatureError):
        verify_claim(sign_claim(replace_delegation(identity, longer), "report", None, NOW), "report", NOW, known=known)
    with pytest.raises(DelegationExpiredError):
        verify_claim(sign_claim(identity, "report", None, NOW), "report", NOW + DAY, known=known)
    for node in (3, 4):
        verify_claim(sign_claim(identity_of(1, node), "report", None, NOW), "report", NOW, known=known)
    assert identity.delegation not in known


def test_two_nodes_share_one_wallet() -> None:
    claims = [sign_claim(identity_of(1, node), "report", node, NOW) for node in (2, 3)]
    verified = [verify_claim(claim, "report", NOW) for claim in claims]
    assert verified[0].wallet_id == verified[1].wallet_id
    assert verified[0].node_id != verified[1].node_id


def test_a_claim_for_another_purpose_or_from_another_node_is_foreign() -> None:
    claim = sign_claim(identity_of(1, 2), "report", None, NOW)
    with pytest.raises(ForeignClaimError, match="'report'"):
        verify_claim(claim, "vote", NOW)
    with pytest.raises(ForeignClaimError, match="in the name of"):
        verify_claim(claim, "report", NOW, sender=identity_of(1, 3).node_id)
    with pytest.raises(SignatureError):  # relabelling it does not help
        verify_claim(replace(claim, domain="vote"), "vote", NOW)


def test_a_delegation_ends() -> None:
    claim = sign_claim(identity_of(1, 2), "report", None, NOW)
    verify_claim(claim, "report", NOW + DAY - 1)
    with pytest.raises(DelegationExpiredError):
        verify_claim(claim, "report", NOW + DAY)


def test_old_claims_and_claims_from_the_future_are_refused() -> None:
    claim = sign_claim(identity_of(1, 2), "report", None, NOW)
    verify_claim(claim, "report", NOW + 60, max_age_seconds=60)
    verify_claim(claim, "report", NOW - 299)  # clocks differ a little
    with pytest.raises(ClaimExpiredError, match="older"):
        verify_claim(claim, "report", NOW + 61, max_age_seconds=60)
    with pytest.raises(ClaimExpiredError, match="future"):
        verify_claim(claim, "report", NOW - 301)


def test_nobody_delegates_for_another_wallet_and_no_claim_moves_to_one() -> None:
    identity = identity_of(1, 2)
    claim = sign_claim(identity, "report", None, NOW)
    forged = replace(identity.delegation, wallet_public_key=wallet_of(9).public_key)
    with pytest.raises(SignatureError):
        verify_claim(sign_claim(replace_delegation(identity, forged), "report", None, NOW), "report", NOW)
    other_wallet = Delegation.issue(wallet_of(9), identity.key.public_key, NOW + DAY)
    with pytest.raises(SignatureError):  # the same node key, honestly delegated by another wallet
        verify_claim(replace(claim, delegation=other_wallet), "report", NOW)
    longer = replace(identity.delegation, expires_at=identity.delegation.expires_at + 1)
    with pytest.raises(SignatureError):
        longer.verify(NOW)


def replace_delegation(identity: NodeIdentity, delegation: Delegation) -> NodeIdentity:
    return NodeIdentity(delegation.wallet_id, identity.node_id, identity.key, delegation)


def test_an_identity_needs_a_delegation_for_its_own_key() -> None:
    mine, other = identity_of(1, 2), identity_of(1, 3)
    with pytest.raises(ValueError, match="not for this node key"):
        NodeIdentity(mine.wallet_id, mine.node_id, mine.key, other.delegation)
    with pytest.raises(ValueError, match="not from this wallet"):
        NodeIdentity(identity_of(5, 2).wallet_id, mine.node_id, mine.key, mine.delegation)


@settings(max_examples=50, deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_passes(position: int, bit: int) -> None:
    identity = identity_of(1, 2)
    data = bytearray(sign_claim(identity, "report", {"tokens": 123456}, NOW).encode())
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(DataError):
        verify_claim(SignedClaim.decode(bytes(data)), "report", NOW)


def test_large_claims_are_not_read_and_not_written() -> None:
    with pytest.raises(ClaimTooLargeError):
        sign_claim(identity_of(1, 2), "report", "x" * MAX_CLAIM_BYTES, NOW).encode()
    with pytest.raises(ClaimTooLargeError):
        SignedClaim.decode(b"[" * (MAX_CLAIM_BYTES + 1))


@pytest.mark.parametrize("change", [{"domain": 1}, {"issued_at": "x"}, {"issued_at": 10**400}, {"x": 1}])
def test_a_malformed_claim_names_the_field(change: dict[str, Any]) -> None:
    value = json.loads(sign_claim(identity_of(1, 2), "report", None, NOW).encode()) | change
    with pytest.raises(MalformedClaimError, match=next(iter(change))):
        SignedClaim.decode(json.dumps(value).encode())


@given(st.binary(max_size=200))
def test_any_other_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedClaimError):
        SignedClaim.decode(data)
