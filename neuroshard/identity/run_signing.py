"""RunParameters as JSON, the run id they lead to, and the owner's signature over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import DataError
from neuroshard.identity.canonical import canonical_json, parse_json
from neuroshard.identity.fields import exact_object, hex_field, number_field, text_field
from neuroshard.identity.hashing import hash_parts
from neuroshard.identity.signing import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Signer,
    purpose_message,
    verify_signature,
)
from neuroshard.types import JsonValue, RunId

MAX_RUN_PARAMETERS_BYTES = 64 * 1024
MAX_TEXT_CHARACTERS = 256
SHA256_BYTES = 32
_MAX_INTEGER = 2**63 - 1
_Value = TypeVar("_Value")


class RunParametersError(DataError):
    """Parameters of a run that are malformed; the message names the field."""


def run_parameters_to_json(parameters: RunParameters) -> Mapping[str, JsonValue]:
    """Every field by name; fields that are real numbers are written as such even when whole."""
    return _object_of(parameters)


def run_parameters_from_json(value: JsonValue) -> RunParameters:
    """Strict reading. Raises RunParametersError that names a missing, unknown or wrong field."""
    try:
        parameters = _read_object(RunParameters, value, "run parameters")
        _check_sizes(parameters)
    except ValueError as error:
        raise RunParametersError(f"The parameters of the run cannot be used: {error}.") from None
    return parameters


def run_id(owner_public_key: bytes, parameters: RunParameters) -> RunId:
    """SHA-256(owner key, canonical JSON of the initial parameters), 64 hex digits."""
    return RunId(hash_parts(owner_public_key, canonical_json(run_parameters_to_json(parameters))).hex())


@dataclass(frozen=True)
class SignedRunParameters:
    """A run's parameters and its owner's signature over them."""

    parameters: RunParameters
    owner_public_key: bytes
    signature: bytes

    @classmethod
    def sign(cls, owner: Signer, parameters: RunParameters) -> SignedRunParameters:
        """Sign as the run's owner."""
        return cls(parameters, owner.public_key, owner.sign(_message(parameters)))

    def to_json(self) -> bytes:
        """Canonical JSON with the key and the signature in hex."""
        return canonical_json(
            {
                "parameters": run_parameters_to_json(self.parameters),
                "owner_public_key": self.owner_public_key.hex(),
                "signature": self.signature.hex(),
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> SignedRunParameters:
        """Read and verify. Raises RunParametersError when malformed, SignatureError when the owner did not sign."""
        try:
            value = parse_json(data, MAX_RUN_PARAMETERS_BYTES)
            fields = exact_object(value, {"parameters", "owner_public_key", "signature"}, "signed run parameters")
            owner = hex_field(fields["owner_public_key"], PUBLIC_KEY_BYTES, "owner_public_key")
            signature = hex_field(fields["signature"], SIGNATURE_BYTES, "signature")
        except ValueError as error:
            raise RunParametersError(f"The signed parameters of the run cannot be read: {error}.") from None
        parameters = run_parameters_from_json(fields["parameters"])
        verify_signature(owner, _message(parameters), signature)
        return cls(parameters, owner, signature)


def _check_sizes(parameters: RunParameters) -> None:
    shape = parameters.architecture
    counts = {
        "hidden_size": shape.hidden_size,
        "layer_count": shape.layer_count,
        "head_count": shape.head_count,
        "key_value_head_count": shape.key_value_head_count,
        "feed_forward_size": shape.feed_forward_size,
        "vocabulary_size": shape.vocabulary_size,
        "sequence_length": shape.sequence_length,
        "stage_count": parameters.stage_count,
        "batch_size": parameters.batch_size,
        "sequences_per_step": parameters.sequences_per_step,
        "inner_steps": parameters.outer.inner_steps,
        "total_shards": parameters.genesis.total_shards,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1")
    if shape.hidden_size % shape.head_count or shape.head_count % shape.key_value_head_count:
        raise ValueError("head_count must divide hidden_size, and key_value_head_count must divide head_count")
    if parameters.stage_count > shape.layer_count:
        raise ValueError("stage_count must not exceed layer_count")
    if not 0 <= parameters.outer.trim_fraction < 0.5:
        raise ValueError("trim_fraction must be in [0, 0.5)")
    _check_digests(parameters.genesis)


def _check_digests(pins: GenesisPins) -> None:
    """Digests become parts of file names and addresses."""
    hex_field(pins.root, SHA256_BYTES, "root")
    hex_field(pins.tokenizer_sha256, SHA256_BYTES, "tokenizer_sha256")
    if pins.signing_key is not None:
        hex_field(pins.signing_key, PUBLIC_KEY_BYTES, "signing_key")


def _message(parameters: RunParameters) -> bytes:
    return purpose_message("run-parameters", run_parameters_to_json(parameters))


def _object_of(value: Any) -> dict[str, JsonValue]:
    hints = get_type_hints(cast("type[Any]", type(value)))
    return {item.name: _json_of(getattr(value, item.name), hints[item.name]) for item in dataclasses.fields(value)}


def _json_of(value: Any, kind: Any) -> JsonValue:
    if dataclasses.is_dataclass(value):
        return _object_of(value)
    # 1 and 1.0 are equal parameters, so they must have equal bytes and one run id
    return float(value) if kind is float else value


def _read_object(kind: type[_Value], value: JsonValue, where: str) -> _Value:
    hints = get_type_hints(kind)
    names = {item.name for item in dataclasses.fields(cast("Any", kind))}
    fields = exact_object(value, names, where)
    return kind(**{name: _read_value(hints[name], fields[name], name) for name in names})


def _read_value(kind: Any, value: JsonValue, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_object(cast("type[Any]", kind), value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} must be one of {', '.join(map(str, get_args(kind)))}")
        return value
    if get_origin(kind) in (Union, UnionType):
        (inner,) = (case for case in get_args(kind) if case is not NoneType)
        return None if value is None else _read_value(inner, value, where)
    if kind is float:
        return number_field(value, where)
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INTEGER:
            raise ValueError(f"{where} must be a whole number from 0 to {_MAX_INTEGER}")
        return value
    if kind is str:
        return text_field(value, MAX_TEXT_CHARACTERS, where)
    raise TypeError(f"run parameters have no reader for {kind}")
