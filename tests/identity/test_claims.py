from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct

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
    Signed,
    TokenSecret,
    Wallet,
    read_claim,
    sign_claim,
    verify_claim,
    verify_signature,
)
from neuroshard.identity.claims import MAX_CLAIM_BYTES
from tests.vectors.make_identity_claim import golden_claim
from tests.worlds.claims import encodings_of

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text("utf-8"))
NOW = 1_700_000_000.0
DAY = 86_400.0


def wallet_of(number: int) -> Wallet:
    return Wallet.from_secret(TokenSecret("hex", number.to_bytes(32, "big")))


def identity_of(wallet: int, node: int) -> NodeIdentity:
    key = NodeKey.from_seed(node.to_bytes(32, "big"))
    delegation = Delegation.issue(wallet_of(wallet), key.public_key, expires_at=NOW + DAY)
    return NodeIdentity(wallet_of(wallet).wallet_id, key.node_id, key, delegation)


class Vote(Struct, frozen=True, forbid_unknown_fields=True):
    """A payload with bounds."""

    kind: ClassVar[str] = "vote"
    step: Annotated[str, Meta(max_length=8)]
    view: Annotated[int, Meta(ge=0, le=9)] = 0
    digests: Annotated[tuple[Annotated[bytes, Meta(max_length=4)], ...], Meta(max_length=3)] = ()


class Short(Vote, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The same without names."""


def test_a_claim_survives_the_wire_and_names_its_maker() -> None:
    identity = identity_of(1, 2)
    sent = sign_claim(identity, "report", {"loss": 2.5, "step": 7}, NOW).encode()
    verified = verify_claim(read_claim(sent, object), "report", NOW + 1, sender=identity.node_id)
    assert (verified.node_id, verified.wallet_id) == (identity.node_id, identity.wallet_id)
    assert verified.payload == {"loss": 2.5, "step": 7}
    assert verified.issued_at == NOW


def test_a_claim_issued_at_a_whole_number_of_seconds_verifies() -> None:
    sent = sign_claim(identity_of(1, 2), "report", None, int(NOW)).encode()
    assert verify_claim(read_claim(sent, object), "report", NOW).issued_at == NOW


def test_a_claim_with_text_that_is_not_unicode_is_malformed() -> None:
    sent = sign_claim(identity_of(1, 2), "report", {"name": "Z"}, NOW).encode()
    with pytest.raises(MalformedClaimError, match=r"(?i)utf-8"):
        read_claim(sent.replace(b"\xa1Z", b"\xa1\xff"), object)


def test_the_golden_claim_verifies() -> None:
    vector = VECTORS["claim"]
    claim = read_claim(bytes.fromhex(vector["encoded"]), object)
    verified = verify_claim(claim, vector["kind"], vector["verified_at"])
    assert (verified.node_id, verified.wallet_id) == (vector["node_id"], vector["wallet_id"])
    assert (verified.payload, verified.issued_at) == (vector["payload"], vector["issued_at"])
    assert claim.encode().hex() == vector["encoded"]
    assert golden_claim() == vector


def test_a_delegation_is_checked_once_and_a_forged_one_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bytes] = []
    monkeypatch.setattr(
        "neuroshard.identity.claims.verify_signature",
        lambda key, message, signature: (checked.append(key), verify_signature(key, message, signature)),
    )
    known, identity = KnownDelegations(most=2), identity_of(1, 2)
    for payload in range(3):
        claim = sign_claim(identity, "report", payload, NOW)
        assert verify_claim(read_claim(claim.encode(), object), "report", NOW, known=known).payload == payload
    assert checked.count(wallet_of(1).public_key) == 1  # the node key signs every claim, the wallet the delegation
    longer = forged(identity.delegation, expires_at=int(NOW + 2 * DAY))
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


def test_a_claim_of_another_kind_is_not_signed_and_one_from_another_node_is_foreign() -> None:
    claim = sign_claim(identity_of(1, 2), "report", None, NOW)
    for kind in ("vote", "repor", "report/1", ""):
        with pytest.raises(SignatureError):
            verify_claim(claim, kind, NOW)
    with pytest.raises(ForeignClaimError, match="in the name of"):
        verify_claim(claim, "report", NOW, sender=identity_of(1, 3).node_id)


def test_a_signature_names_protocol_kind_and_version() -> None:
    wallet, delegation = wallet_of(1), identity_of(1, 2).delegation
    signed = delegation.signed
    verify_signature(wallet.public_key, b"neuroshard/signed/delegation/1\0" + signed.body, signed.signature)
    with pytest.raises(SignatureError):
        signed.verify(wallet.public_key, "report")


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
    stolen = forged(identity.delegation, wallet_public_key=wallet_of(9).public_key)
    with pytest.raises(SignatureError):
        verify_claim(sign_claim(replace_delegation(identity, stolen), "report", None, NOW), "report", NOW)
    other_wallet = Delegation.issue(wallet_of(9), identity.key.public_key, NOW + DAY)
    signed = [other_wallet.signed.body, other_wallet.signed.signature]
    moved = altered(claim.encode(), lambda content: content.__setitem__(2, signed))
    assert read_claim(moved, object).delegation == other_wallet
    with pytest.raises(SignatureError):  # the same node key, honestly delegated by another wallet
        verify_claim(read_claim(moved, object), "report", NOW)
    longer = forged(identity.delegation, expires_at=identity.delegation.grant.expires_at + 1)
    with pytest.raises(SignatureError):
        longer.verify(NOW)


def forged(delegation: Delegation, **changes: Any) -> Delegation:
    """Another grant under the same signature."""
    body = msgspec.msgpack.encode(msgspec.structs.replace(delegation.grant, **changes))
    return Delegation.read(Signed(body, delegation.signed.signature))


def altered(claim: bytes, change: Callable[[list[Any]], object]) -> bytes:
    """A claim with another content under the same signature."""
    body, signature = msgspec.msgpack.decode(claim)
    content = msgspec.msgpack.decode(body)
    change(content)
    return msgspec.msgpack.encode([msgspec.msgpack.encode(content), signature])


def replace_delegation(identity: NodeIdentity, delegation: Delegation) -> NodeIdentity:
    return NodeIdentity(delegation.wallet_id, identity.node_id, identity.key, delegation)


def test_an_identity_needs_a_delegation_for_its_own_key() -> None:
    mine, other = identity_of(1, 2), identity_of(1, 3)
    with pytest.raises(ValueError, match="not for this node key"):
        NodeIdentity(mine.wallet_id, mine.node_id, mine.key, other.delegation)
    with pytest.raises(ValueError, match="not from this wallet"):
        NodeIdentity(identity_of(5, 2).wallet_id, mine.node_id, mine.key, mine.delegation)


def test_a_wallet_renews_its_delegation_while_half_of_its_time_is_left() -> None:
    wallet, identity = wallet_of(1), identity_of(1, 2)
    renewing = replace(identity, wallet=wallet)
    hours = [3600.0 * hour for hour in range(24 * 60)]  # a node that runs for two months
    # the clock is also set back by three days, and the node sleeps for a month
    for second in (*hours, hours[-1] - 3 * DAY, hours[-1] + 30 * DAY):
        now = NOW + second
        claim = sign_claim(renewing, "report", second, now)
        verify_claim(read_claim(claim.encode(), object), "report", now)
        assert 7 * DAY <= claim.delegation.grant.expires_at - now <= 14 * DAY
    assert len({sign_claim(renewing, "report", 0, now + hour).delegation.grant.expires_at for hour in hours[:168]}) == 1
    with pytest.raises(DelegationExpiredError):
        verify_claim(read_claim(sign_claim(identity, "report", 0, now).encode(), object), "report", now)


@settings(max_examples=50, deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_passes(position: int, bit: int) -> None:
    identity = identity_of(1, 2)
    data = bytearray(sign_claim(identity, "report", {"tokens": 123456}, NOW).encode())
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(DataError):
        verify_claim(read_claim(bytes(data), object), "report", NOW)


def test_large_claims_are_not_read_and_not_written() -> None:
    with pytest.raises(ClaimTooLargeError):
        sign_claim(identity_of(1, 2), "report", "x" * MAX_CLAIM_BYTES, NOW).encode()
    with pytest.raises(ClaimTooLargeError):
        read_claim(b"[" * (MAX_CLAIM_BYTES + 1), object)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ((0, {"step": "a", "view": 10}), r"`int` <= 9 - at `\$\.view`"),
        ((0, {"step": "a", "view": True}), r"at `\$\.view`"),
        ((0, {"step": "a", "digests": [b"1", b"12345"]}), r"at `\$\.digests\[1\]`"),
        ((0, {"step": "a", "x": 1}), "unknown field `x`"),
        ((0, {"view": 1}), "missing required field `step`"),
        ((0, ["a", 1]), "Expected `object`"),
        ((1, "x"), r"at `\$\.issued_at`"),
        ((1, float("nan")), r"at `\$\.issued_at`"),
        ((1, -1.0), r"at `\$\.issued_at`"),
        ((2, [b"", b""]), r"length >= 64 - at `\$\.delegation\[1\]`"),
        ((2, [b"", bytes(64)]), "truncated"),
        ((2, [msgspec.msgpack.encode([bytes(31), bytes(32), 1]), bytes(64)]), r"at `\$\.node_public_key`"),
        ((2, [msgspec.msgpack.encode([bytes(32), bytes(32), -1]), bytes(64)]), r"at `\$\.expires_at`"),
        ((2, [msgspec.msgpack.encode([bytes(32), bytes(32), 1, 1]), bytes(64)]), "at most length 3, got 4"),
    ],
)
def test_a_malformed_claim_names_the_field(change: tuple[int, object], path: str) -> None:
    sent = sign_claim(identity_of(1, 2), "vote", Vote("a"), NOW).encode()
    assert read_claim(sent, Vote).payload == Vote("a")
    with pytest.raises(MalformedClaimError, match=path):
        read_claim(altered(sent, lambda content: content.__setitem__(*change)), Vote)


def test_a_payload_without_names_is_refused_by_name() -> None:
    with pytest.raises(MalformedClaimError, match=r"`int` <= 9 - at `\$\.view`"):
        read_claim(sign_claim(identity_of(1, 2), "vote", ["a", 10], NOW).encode(), Short)
    with pytest.raises(MalformedClaimError, match=r"at `\$\.digests\[1\]`"):
        read_claim(sign_claim(identity_of(1, 2), "vote", ["a", 1, [b"", "x"]], NOW).encode(), Short)


def test_what_surrounds_the_signed_bytes_is_read_strictly() -> None:
    sent = sign_claim(identity_of(1, 2), "vote", Vote("a"), NOW).encode()
    body, signature = msgspec.msgpack.decode(sent)
    assert read_claim(sent, Vote) == read_claim(msgspec.msgpack.encode([body, signature]), Vote)
    spoilt: list[object] = [[body], [body, signature, 1], [body, signature[1:]], [body, signature + b"x"]]
    spoilt += [{"body": body, "signature": signature}, [body + b"\0", signature], [body[:-1], signature]]
    spoilt += [["body", signature], [body, "x" * 64], body, None]
    for one in (*map(msgspec.msgpack.encode, spoilt), sent + b"\0", sent[:-1]):
        with pytest.raises(MalformedClaimError):
            read_claim(one, Vote)


LARGEST = b"\x7f\xff\xff\xff"


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd" + LARGEST,  # an array
        b"\xdf" + LARGEST,  # a map
        b"\xc6" + LARGEST,  # bytes
        b"\xdb" + LARGEST,  # text
        b"\xc9" + LARGEST + b"\1",  # an extension
        b"\x82\xa4step\xa1a\xa7digests\xdd" + LARGEST,
        b"\x82\xa4step\xdb" + LARGEST,
        b"\x91" * 60_000,
    ],
    ids=["array", "map", "bytes", "text", "extension", "inner array", "inner text", "nest"],
)
@pytest.mark.parametrize("form", [object, Vote, Short])
def test_a_claimed_length_allocates_nothing(payload: bytes, form: type[Any]) -> None:
    sent = sign_claim(identity_of(1, 2), "vote", msgspec.Raw(payload), NOW).encode()
    outer = b"\x92\xc6" + LARGEST + bytes(60)
    for data in (sent, outer, b"\xdd" + LARGEST):
        tracemalloc.start()
        try:
            with pytest.raises(MalformedClaimError):
                read_claim(data, form)
            assert tracemalloc.get_traced_memory()[1] < 300_000
        finally:
            tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_other_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedClaimError):
        read_claim(data, object)


def test_a_claim_has_one_encoding() -> None:
    sent = sign_claim(identity_of(1, 2), "vote", Vote("a"), NOW).encode()
    shortest, *others = encodings_of(sent)
    assert shortest == sent
    assert len(others) == 107  # 3 forms of the array, 6 of the body and 6 of the signature
    for other in others:
        with pytest.raises(MalformedClaimError):
            read_claim(other, Vote)


class Colour(StrEnum):
    """Some words."""

    RED = "red"


class Painted(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A payload with words."""

    colour: Colour
    more: tuple[Colour, ...] = ()
    counts: dict[Colour, int] = {}


PATH_LIKE = st.from_regex(r"[x\n]?( - at )?(`key` in )?`?\$\[[0-9]{1,5}\]`?", fullmatch=True)


@given(st.text() | PATH_LIKE)
@example("`$[999]`")
@example("`$[999]")
@example("x - at `$[999]`")
def test_any_text_in_place_of_a_word_is_refused_by_the_name_of_its_field(text: str) -> None:
    assume(text != "red")
    for payload, name in (([text], "colour"), (["red", ["red", text]], "more[1]")):
        with pytest.raises(MalformedClaimError) as caught:
            read_claim(sign_claim(identity_of(1, 2), "paint", payload, NOW).encode(), Painted)
        assert str(caught.value) == f"A claim cannot be read: Invalid enum value - at `$.{name}`."
    with pytest.raises(MalformedClaimError, match=r"Invalid enum value - at `key` in `\$\.counts`"):
        read_claim(sign_claim(identity_of(1, 2), "paint", ["red", [], {text: 1}], NOW).encode(), Painted)


@given(st.text() | PATH_LIKE)
def test_any_name_of_a_field_is_refused_in_one_printable_line(text: str) -> None:
    assume(text not in Vote.__struct_fields__)
    for form in (Vote, Painted):
        with pytest.raises(MalformedClaimError) as caught:
            read_claim(sign_claim(identity_of(1, 2), "vote", {"step": "a", text: 1}, NOW).encode(), form)
        assert re.fullmatch("[ -~]{1,250}", str(caught.value))
