"""Reports on the wire: the canonical JSON of a signed claim, deflated with a dictionary of the words all of them share.

A report of 1,040 bytes travels in about 380, and every node receives several copies of every one.
"""

from __future__ import annotations

import zlib

from neuroshard.identity import ClaimTooLargeError, MalformedClaimError, SignedClaim

MAX_PACKED_BYTES = 2048
MAX_REPORT_BYTES = 4096  # unpacked
_RAW_DEFLATE = -15  # no header and no checksum: the signature is the checksum
_FORMAT = b"\x01"  # names the dictionary below; whoever changes that must change this
_DICTIONARY = (
    b'["validator"]["worker"]["driver"]"state":"paused""state":"not_training""state":"waiting_for_data""loss_ema":null,'
    b'"shard":null,"leaving":true,"state_hash":"",0123456789abcdef'
    b'{"delegation":{"expires_at":17,"node_public_key":"","signature":"","wallet_public_key":""},"domain":"report",'
    b'"issued_at":17,"payload":{"failed_syncs":0,"interval_seconds":10.0,"layers":[0,4],"leaving":false,"loss_ema":3.,'
    b'"outer_step":0,"roles":["driver","validator"],"run_id":"","sequence":17,"shard":1,"shards_seen":1,'
    b'"started_at":17,"state":"training","state_hash":"","steps":1,"successful_syncs":0,"tokens":1,'
    b'"tokens_per_second":1},"signature":""}'
)


def packed(claim: SignedClaim) -> bytes:
    """A claim as it travels by gossip. Raises ClaimTooLargeError."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, _RAW_DEFLATE, zdict=_DICTIONARY)
    data = _FORMAT + deflate.compress(claim.encode()) + deflate.flush()
    if len(data) > MAX_PACKED_BYTES:
        raise ClaimTooLargeError(f"A packed claim has {len(data)} bytes; at most {MAX_PACKED_BYTES} are allowed.")
    return data


def unpacked(data: bytes) -> SignedClaim:
    """Read what `packed` wrote, without verifying; never more than MAX_REPORT_BYTES are inflated.

    Raises ClaimTooLargeError or MalformedClaimError.
    """
    if len(data) > MAX_PACKED_BYTES:
        raise ClaimTooLargeError(f"A packed claim has {len(data)} bytes; at most {MAX_PACKED_BYTES} are allowed.")
    if not data.startswith(_FORMAT):
        raise MalformedClaimError("A packed claim is of a format that this version does not know.")
    inflate = zlib.decompressobj(_RAW_DEFLATE, zdict=_DICTIONARY)
    try:
        content = inflate.decompress(data[len(_FORMAT) :], MAX_REPORT_BYTES + 1)
    except zlib.error:
        raise MalformedClaimError("A packed claim cannot be unpacked.") from None
    if not inflate.eof and len(content) <= MAX_REPORT_BYTES:
        raise MalformedClaimError("A packed claim is cut off.")
    if inflate.unused_data:
        raise MalformedClaimError("A packed claim has bytes after its end.")
    return SignedClaim.decode(content, MAX_REPORT_BYTES)
