from __future__ import annotations

import json
from math import nan
from random import Random

import pytest
from claim_samples import EPOCH, REPORT, identity_of, packed_with
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import DataError
from neuroshard.identity import ClaimTooLargeError, MalformedClaimError, sign_claim
from neuroshard.membership.reports import _HEAD, HEAD_BYTES, MAX_PACKED_BYTES, MAX_REPORT_BYTES, packed, unpacked

CLAIM = sign_claim(identity_of(1), "report", REPORT.to_json(), EPOCH + 0.1)


def deflated(content: bytes) -> bytes:
    """What a stranger may send: any content under our format."""
    return packed_with(CLAIM, content)


def test_a_claim_survives_and_travels_in_a_third() -> None:
    data = packed(CLAIM)
    assert unpacked(data) == CLAIM
    assert len(data) < 0.36 * len(CLAIM.encode())


def test_a_claim_too_large_is_not_packed() -> None:
    noise = Random(1).randbytes(3000).hex()
    with pytest.raises(ClaimTooLargeError):
        packed(sign_claim(identity_of(1), "report", {**REPORT.to_json(), "noise": noise}, EPOCH))
    with pytest.raises(ClaimTooLargeError):
        unpacked(bytes(MAX_PACKED_BYTES + 1))


def test_a_claim_about_no_run_is_not_packed() -> None:
    for payload in (None, {}, {"run_id": "short"}):
        with pytest.raises(ValueError, match="run_id"):
            packed(sign_claim(identity_of(1), "report", payload, EPOCH))


def test_a_bomb_is_not_inflated() -> None:
    bomb = deflated(bytes(100 * MAX_REPORT_BYTES))
    assert len(bomb) < MAX_PACKED_BYTES
    with pytest.raises(ClaimTooLargeError):
        unpacked(bomb)


def test_what_is_cut_off_longer_or_of_another_format_is_refused() -> None:
    data = packed(CLAIM)
    damaged = [b"", b"\x01" + data[1:], data[:-9], data + b"x", data[:1], data[:HEAD_BYTES], b"\x02\xff\xff"]
    contents: list[object] = [
        {},
        {"domain": "report"},
        {"domain": "report", "payload": None},
        {"domain": 1, "payload": {}},
    ]
    contents += [{"domain": "report", "payload": {"run_id": REPORT.run_id}}]  # it stands in the head
    for bad in (*damaged, *(deflated(json.dumps(content).encode()) for content in contents)):
        with pytest.raises(MalformedClaimError):
            unpacked(bad)
    parts = list(_HEAD.unpack(data[1:HEAD_BYTES]))
    parts[5] = nan
    with pytest.raises(MalformedClaimError):
        unpacked(data[:1] + _HEAD.pack(*parts) + data[HEAD_BYTES:])


@given(st.binary(max_size=400), st.integers(0, 400))
def test_any_bytes_are_read_or_refused(noise: bytes, place: int) -> None:
    data = packed(CLAIM)
    for bad in (noise, b"\x02" + noise, data[:place] + noise + data[place + len(noise) :], deflated(noise)):
        try:
            claim = unpacked(bad)
        except DataError:
            continue
        assert claim.domain == claim.domain.strip() or claim.domain != ""
