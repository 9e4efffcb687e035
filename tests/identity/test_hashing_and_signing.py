from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.identity import SignatureError, canonical_json, hash_parts, parse_json, sign_json, verify_json
from neuroshard.identity.signing import SigningKey, purpose_message, verify_signature
from neuroshard.types import JsonValue

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text("utf-8"))

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("vector", VECTORS["hash_parts"], ids=lambda v: str(v["parts"]))
def test_hash_parts_is_stable(vector: dict[str, Any]) -> None:
    assert hash_parts(*vector["parts"]).hex() == vector["sha256"]


def test_hash_parts_prefixes_every_part_with_its_length() -> None:
    expected = sha256(b"\0\0\0\0\0\0\0\x02ab" + b"\0\0\0\0\0\0\0\x0242").digest()
    assert hash_parts("ab", 42) == hash_parts(b"ab", "42") == expected


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_different_tuples_have_different_hashes(one: list[bytes], other: list[bytes]) -> None:
    assert (hash_parts(*one) == hash_parts(*other)) == (one == other)


@pytest.mark.parametrize("vector", VECTORS["canonical_json"], ids=lambda v: v["bytes"][:12])
def test_canonical_json_is_stable(vector: dict[str, Any]) -> None:
    assert canonical_json(vector["value"]).hex() == vector["bytes"]


@given(json_values)
def test_canonical_json_is_read_back_and_written_again_with_equal_bytes(value: JsonValue) -> None:
    try:
        data = canonical_json(value)
    except UnicodeEncodeError:  # lone surrogates are no text
        return
    read = parse_json(data, max_bytes=len(data))
    assert read == value
    assert canonical_json(read) == data


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}, "\ud800"])
def test_what_is_not_json_has_no_canonical_form(value: JsonValue) -> None:
    with pytest.raises(ValueError, match=r"JSON|surrogates"):
        canonical_json(value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":1,"a":2}', "twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "too large"),
        (b"[" * 100_000, "deep"),
        (b"[" * 65 + b"]" * 65, "64 deep"),
        (b"\xff", "decode"),
        (b"", "Expecting value"),
        (b"1" * 200_001, "at most 200000"),
        (b"1" * 100_000, "limit"),
    ],
)
def test_json_from_strangers_is_refused_with_a_value_error(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(data, max_bytes=200_000)


@pytest.mark.parametrize("vector", VECTORS["ed25519"], ids=lambda v: v["seed"][:8])
def test_signatures_are_those_of_rfc_8032(vector: dict[str, str]) -> None:
    key = SigningKey.from_seed(bytes.fromhex(vector["seed"]))
    assert key.public_key.hex() == vector["public_key"]
    assert key.sign(bytes.fromhex(vector["message"])).hex() == vector["signature"]


@given(json_values, json_values)
def test_a_signature_holds_for_its_own_value_only(value: JsonValue, other: JsonValue) -> None:
    key = SigningKey.from_seed(bytes(32))
    try:
        signature = sign_json(key, value)
        same = canonical_json(value) == canonical_json(other)
    except UnicodeEncodeError:
        return
    verify_json(key.public_key, value, signature)
    if not same:
        with pytest.raises(SignatureError):
            verify_json(key.public_key, other, signature)


@pytest.mark.parametrize("signature", ["", "zz" * 64, "00" * 64, "00" * 63, "é"])
def test_a_malformed_signature_is_a_signature_error(signature: str) -> None:
    with pytest.raises(SignatureError):
        verify_json(SigningKey.from_seed(bytes(32)).public_key, {}, signature)


@pytest.mark.parametrize("public_key", [b"", bytes(31), bytes(32), b"\xff" * 32])
def test_a_malformed_public_key_is_a_signature_error(public_key: bytes) -> None:
    with pytest.raises(SignatureError):
        verify_signature(public_key, b"message", bytes(range(64)))


def test_a_signature_for_one_purpose_is_none_for_another() -> None:
    key = SigningKey.from_seed(bytes(32))
    signature = key.sign(purpose_message("claim", {}))
    verify_signature(key.public_key, purpose_message("claim", {}), signature)
    for message in (purpose_message("delegation", {}), canonical_json({})):
        with pytest.raises(SignatureError):
            verify_signature(key.public_key, message, signature)
