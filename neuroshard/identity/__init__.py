"""Token, wallet, node key, signatures and signed claims. Knows nothing of networks, models or training."""

from neuroshard.identity.canonical import canonical_json, parse_json
from neuroshard.identity.claims import (
    ClaimExpiredError,
    ClaimTooLargeError,
    ForeignClaimError,
    MalformedClaimError,
    NodeIdentity,
    SignedClaim,
    VerifiedClaim,
    sign_claim,
    verify_claim,
)
from neuroshard.identity.delegation import Delegation, DelegationExpiredError, KnownDelegations
from neuroshard.identity.hashing import hash_parts
from neuroshard.identity.node_key import NodeKey
from neuroshard.identity.peer_id import node_id_of, public_key_of
from neuroshard.identity.phrase import new_phrase
from neuroshard.identity.run_json import (
    RunParametersError,
    architecture_from_json,
    genesis_pins_from_json,
    run_parameters_from_json,
    run_parameters_to_json,
)
from neuroshard.identity.run_signing import SignedRunParameters, run_id
from neuroshard.identity.signing import SignatureError, Signer, sign_json, verify_json, verify_signature
from neuroshard.identity.token import TokenSecret, parse_token
from neuroshard.identity.wallet import Wallet, wallet_id_of

__all__ = [
    "ClaimExpiredError",
    "ClaimTooLargeError",
    "Delegation",
    "DelegationExpiredError",
    "ForeignClaimError",
    "KnownDelegations",
    "MalformedClaimError",
    "NodeIdentity",
    "NodeKey",
    "RunParametersError",
    "SignatureError",
    "SignedClaim",
    "SignedRunParameters",
    "Signer",
    "TokenSecret",
    "VerifiedClaim",
    "Wallet",
    "architecture_from_json",
    "canonical_json",
    "genesis_pins_from_json",
    "hash_parts",
    "new_phrase",
    "node_id_of",
    "parse_json",
    "parse_token",
    "public_key_of",
    "run_id",
    "run_parameters_from_json",
    "run_parameters_to_json",
    "sign_claim",
    "sign_json",
    "verify_claim",
    "verify_json",
    "verify_signature",
    "wallet_id_of",
]
