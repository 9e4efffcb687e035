"""Reports on the wire: keys, signatures and the run as they are, the rest as JSON, deflated with a dictionary of the
words that all reports share.

A report of 980 bytes travels in 300, of which 224 are keys, signatures and the run: nothing makes those shorter.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import isfinite
from struct import Struct

from neuroshard.identity import (
    ClaimTooLargeError,
    Delegation,
    MalformedClaimError,
    SignedClaim,
    canonical_json,
    parse_json,
)
from neuroshard.identity.fields import exact_object, hex_field, text_field
from neuroshard.types import JsonValue

MAX_PACKED_BYTES = 2048
MAX_REPORT_BYTES = 4096  # of the JSON, inflated
_MAX_DOMAIN_CHARACTERS = 64
_RUN_BYTES = 32
_RAW_DEFLATE = -15  # no header and no checksum: the signature is the checksum
_FORMAT = b"\x02"  # names head and dictionary below; whoever changes those must change this
_HEAD = Struct("!64s32s32s64sQd32s")  # signature, keys of node and wallet, its signature, expiry, time, run
HEAD_BYTES = len(_FORMAT) + _HEAD.size
_DICTIONARY = (
    b'["validator"]["worker"]["driver"]"state":"paused""state":"not_training""state":"waiting_for_data"'
    b'"state":"starting""loss_ema":null,"layers":null,"shard":null,"leaving":true,"ready_percent":1"state_hash":"",'
    b'0123456789abcdef{"domain":"report","payload":{"failed_syncs":0,"inherited_steps":0,"inherited_tokens":0,'
    b'"interval_seconds":10.0,"layers":[0,4],"leaving":false,"loss_ema":3.,"outer_step":0,'
    b'"roles":["driver","validator"],"sequence":17,"shard":1,"shards_seen":1,"started_at":17,"state":"training",'
    b'"state_hash":"","steps":1,"successful_syncs":0,"tokens":1,"tokens_per_second":1,"windows":[[0,1],[1,2]]}}'
)


def packed(claim: SignedClaim) -> bytes:
    """A claim about a run as it travels by gossip. Raises ClaimTooLargeError, ValueError when it names no run."""
    payload = dict(claim.payload) if isinstance(claim.payload, Mapping) else {}
    run = hex_field(payload.pop("run_id", None), _RUN_BYTES, "run_id")
    delegation = claim.delegation
    head = _HEAD.pack(
        claim.signature,
        delegation.node_public_key,
        delegation.wallet_public_key,
        delegation.signature,
        delegation.expires_at,
        claim.issued_at,
        run,
    )
    content = canonical_json({"domain": claim.domain, "payload": payload})
    deflate = zlib.compressobj(9, zlib.DEFLATED, _RAW_DEFLATE, zdict=_DICTIONARY)
    data = _FORMAT + head + deflate.compress(content) + deflate.flush()
    if len(data) > MAX_PACKED_BYTES or len(content) > MAX_REPORT_BYTES:
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
    if len(data) < HEAD_BYTES:
        raise MalformedClaimError("A packed claim is cut off.")
    signature, node, wallet, wallet_signature, expires_at, issued_at, run = _HEAD.unpack_from(data, len(_FORMAT))
    if not isfinite(issued_at):
        raise MalformedClaimError("A packed claim was made at no time.")
    domain, payload = _inflated(data[HEAD_BYTES:])
    delegation = Delegation(node, wallet, expires_at, wallet_signature)
    return SignedClaim(domain, {**payload, "run_id": run.hex()}, issued_at, signature, delegation)


def _inflated(deflated: bytes) -> tuple[str, Mapping[str, JsonValue]]:
    """Domain and payload without the run."""
    inflate = zlib.decompressobj(_RAW_DEFLATE, zdict=_DICTIONARY)
    try:
        content = inflate.decompress(deflated, MAX_REPORT_BYTES + 1)
    except zlib.error:
        raise MalformedClaimError("A packed claim cannot be unpacked.") from None
    if len(content) > MAX_REPORT_BYTES:
        raise ClaimTooLargeError(f"A packed claim is inflated to more than {MAX_REPORT_BYTES} bytes.")
    if not inflate.eof:
        raise MalformedClaimError("A packed claim is cut off.")
    if inflate.unused_data:
        raise MalformedClaimError("A packed claim has bytes after its end.")
    try:
        fields = exact_object(parse_json(content, MAX_REPORT_BYTES), {"domain", "payload"}, "claim")
        payload = fields["payload"]
        if not isinstance(payload, Mapping) or "run_id" in payload:
            raise ValueError("payload must be a JSON object without the run")  # noqa: TRY301 - malformed input
        return text_field(fields["domain"], _MAX_DOMAIN_CHARACTERS, "domain"), payload
    except (ValueError, OverflowError) as error:
        raise MalformedClaimError(f"A claim cannot be read: {error}.") from None
