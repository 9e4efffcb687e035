"""The id of a run, and its owner's signature over its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuroshard.config.run_parameters import RunParameters
from neuroshard.identity.canonical import canonical_json, parse_json
from neuroshard.identity.fields import exact_object, hex_field
from neuroshard.identity.hashing import hash_parts
from neuroshard.identity.run_json import RunParametersError, run_parameters_from_json, run_parameters_to_json
from neuroshard.identity.signing import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Signer,
    purpose_message,
    verify_signature,
)
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import JsonValue, RunId, WalletId

MAX_RUN_PARAMETERS_BYTES = 64 * 1024


def run_id(owner_public_key: bytes, parameters: RunParameters) -> RunId:
    """SHA-256(owner key, canonical JSON of the initial parameters), 64 hex digits."""
    return RunId(hash_parts(owner_public_key, canonical_json(run_parameters_to_json(parameters))).hex())


@dataclass(frozen=True)
class SignedRunParameters:
    """A run's parameters and its owner's signature over them."""

    parameters: RunParameters
    owner_public_key: bytes
    signature: bytes

    @property
    def owner_wallet_id(self) -> WalletId:
        """The wallet that signed."""
        return wallet_id_of(self.owner_public_key)

    @classmethod
    def sign(cls, owner: Signer, parameters: RunParameters) -> SignedRunParameters:
        """Sign as the run's owner. Raises RunParametersError for parameters that nobody would accept."""
        run_parameters_from_json(run_parameters_to_json(parameters))
        return cls(parameters, owner.public_key, owner.sign(_message(parameters)))

    def to_value(self) -> Mapping[str, JsonValue]:
        """The JSON object, with the key and the signature in hex."""
        return {
            "parameters": run_parameters_to_json(self.parameters),
            "owner_public_key": self.owner_public_key.hex(),
            "signature": self.signature.hex(),
        }

    def to_json(self) -> bytes:
        """`to_value` as canonical JSON."""
        return canonical_json(self.to_value())

    @classmethod
    def from_json(cls, data: bytes) -> SignedRunParameters:
        """Read and verify. Raises RunParametersError when malformed, SignatureError when the owner did not sign."""
        try:
            value = parse_json(data, MAX_RUN_PARAMETERS_BYTES)
        except ValueError as error:
            raise RunParametersError(f"The signed parameters of the run cannot be read: {error}.") from None
        return cls.from_value(value)

    @classmethod
    def from_value(cls, value: JsonValue) -> SignedRunParameters:
        """Read and verify a JSON object. Raises as `from_json` does."""
        try:
            fields = exact_object(value, {"parameters", "owner_public_key", "signature"}, "signed run parameters")
            owner = hex_field(fields["owner_public_key"], PUBLIC_KEY_BYTES, "owner_public_key")
            signature = hex_field(fields["signature"], SIGNATURE_BYTES, "signature")
        except ValueError as error:
            raise RunParametersError(f"The signed parameters of the run cannot be read: {error}.") from None
        parameters = run_parameters_from_json(fields["parameters"])
        verify_signature(owner, _message(parameters), signature)
        return cls(parameters, owner, signature)


def _message(parameters: RunParameters) -> bytes:
    return purpose_message("run-parameters", run_parameters_to_json(parameters))
