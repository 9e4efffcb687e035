from __future__ import annotations

import zlib

import pytest
from claim_samples import EPOCH, REPORT, identity_of
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import DataError
from neuroshard.identity import ClaimTooLargeError, MalformedClaimError, sign_claim
from neuroshard.swarm.packing import _DICTIONARY, MAX_PACKED_BYTES, MAX_REPORT_BYTES, packed, unpacked

CLAIM = sign_claim(identity_of(1), "report", REPORT.to_json(), EPOCH)


def deflated(content: bytes) -> bytes:
    """What a stranger may send: any content under our format."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=_DICTIONARY)
    return b"\x01" + deflate.compress(content) + deflate.flush()


def test_a_claim_survives_and_travels_in_less_than_half() -> None:
    data = packed(CLAIM)
    assert unpacked(data) == CLAIM
    assert len(data) < 0.45 * len(CLAIM.encode())


def test_a_claim_too_large_is_not_packed() -> None:
    import random

    noise = random.Random(1).randbytes(3000).hex()
    with pytest.raises(ClaimTooLargeError):
        packed(sign_claim(identity_of(1), "report", noise, EPOCH))
    with pytest.raises(ClaimTooLargeError):
        unpacked(bytes(MAX_PACKED_BYTES + 1))


def test_a_bomb_is_not_inflated() -> None:
    bomb = deflated(bytes(100 * MAX_REPORT_BYTES))
    assert len(bomb) < MAX_PACKED_BYTES
    with pytest.raises(ClaimTooLargeError):
        unpacked(bomb)


def test_what_is_cut_off_longer_or_of_another_format_is_refused() -> None:
    data = packed(CLAIM)
    for bad in (b"", b"\x02" + data[1:], data[:-9], data + b"x", data[:1], b"\x01\xff\xff", deflated(b"{}")):
        with pytest.raises(MalformedClaimError):
            unpacked(bad)


@given(st.binary(max_size=400), st.integers(0, 400))
def test_any_bytes_are_read_or_refused(noise: bytes, place: int) -> None:
    data = packed(CLAIM)
    for bad in (noise, b"\x01" + noise, data[:place] + noise + data[place + len(noise) :], deflated(noise)):
        try:
            claim = unpacked(bad)
        except DataError:
            continue
        assert claim.domain == claim.domain.strip() or claim.domain != ""
