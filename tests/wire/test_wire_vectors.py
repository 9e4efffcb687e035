from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from neuroshard import messages as wire
from neuroshard.messages import FrameDecoder, FrameLimits, WireError, decode, encode
from tests.worlds.claims import VECTORS, golden_bytes, golden_frame, large_limits


def named(vectors: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("vector", [pytest.param(vector, id=vector["name"]) for vector in vectors])


@named(VECTORS["frames"])
def test_a_frame_becomes_the_written_bytes(vector: dict[str, Any]) -> None:
    encoded = encode(golden_frame(vector))
    body = b"".join(encoded.body)
    assert encoded.head.hex() == vector["head"]
    assert encoded.byte_count == len(encoded.head) + len(body)
    if "body_sha256" in vector:
        assert sha256(body).hexdigest() == vector["body_sha256"]
        assert len(encoded.chunks) == vector["chunks"]


@named(VECTORS["frames"])
def test_the_written_bytes_become_the_frame(vector: dict[str, Any]) -> None:
    assert decode(golden_bytes(vector), large_limits) == golden_frame(vector)


@named(VECTORS["refused"])
def test_what_must_be_refused_is_refused_for_its_own_reason(vector: dict[str, Any]) -> None:
    expected: type[WireError] = getattr(wire, vector["error"])
    with pytest.raises(WireError) as caught:
        decode(bytes.fromhex(vector["data"]), lambda _kind: FrameLimits(**vector["limits"]))
    assert type(caught.value) is expected
    assert vector["says"].lower() in str(caught.value).lower()


@named([vector for vector in VECTORS["refused"] if not vector["name"].startswith(("cut", "nothing", "bytes after"))])
def test_what_must_be_refused_byte_by_byte_is_not_read_to_the_end(vector: dict[str, Any]) -> None:
    """A lie is told as soon as its bytes are here, and the decoder takes nothing after it."""
    decoder = FrameDecoder(lambda _kind: FrameLimits(**vector["limits"]))
    data = bytes.fromhex(vector["data"])
    with pytest.raises(WireError):
        feed_bytes(decoder, data)
    with pytest.raises(WireError, match="refused already"):
        decoder.feed(b"\0")
    assert not decoder.is_complete


def feed_bytes(decoder: FrameDecoder, data: bytes) -> None:
    for i in range(len(data)):
        decoder.feed(data[i : i + 1])
