"""Token, wallet, node key, signatures and signed claims. Independent of networks, models and training."""

from neuroshard.identity.claims import (
    ClaimExpiredError,
    ClaimTooLargeError,
    Delegation,
    DelegationExpiredError,
    ForeignClaimError,
    KnownDelegations,
    MalformedClaimError,
    NodeIdentity,
    SignedClaim,
    VerifiedClaim,
    sign_claim,
    verify_claim,
)
from neuroshard.identity.node_key import NodeKey, node_id_of, public_key_of
from neuroshard.identity.run_parameters import (
    RunParametersError,
    SignedRunParameters,
    architecture_from_json,
    genesis_pins_from_json,
    run_id,
    run_parameters_from_json,
    run_parameters_to_json,
)
from neuroshard.identity.signing import SignatureError, Signer, hash_parts, sign_json, verify_json, verify_signature
from neuroshard.identity.strict_json import canonical_json, parse_json
from neuroshard.identity.wallet import TokenSecret, Wallet, new_phrase, parse_token, wallet_id_of

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
