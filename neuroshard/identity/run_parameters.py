"""The parameters of a run: their allowed values, their JSON form, the run id and the owner's signature.

The JSON form is hashed, signed and sent. A field with `since` in its metadata is left out while it has its default, so
that runs older than the field keep their id and their signature. Limits of this computer are checked elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.config.run_parameters import MAX_SEEDS, GenesisPins, OuterOptimization, RunParameters
from neuroshard.errors import DataError
from neuroshard.identity.signing import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Signer,
    hash_parts,
    purpose_message,
    verify_signature,
)
from neuroshard.identity.strict_json import (
    canonical_json,
    exact_object,
    flag_field,
    hex_field,
    number_field,
    object_fields,
    parse_json,
    text_field,
)
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import Architecture, JsonValue, RunId, WalletId

SHA256_BYTES = 32


def check_parameters(parameters: RunParameters) -> None:
    """Raise ValueError that names a field whose value no run can have."""
    check_architecture(parameters.architecture)
    _check_at_least_one(
        {
            "version": parameters.version,
            "stage_count": parameters.stage_count,
            "batch_size": parameters.batch_size,
            "sequences_per_step": parameters.sequences_per_step,
            "inner_steps": parameters.outer.inner_steps,
            "averaging_target_batch_size": parameters.outer.averaged_sequences,
            "averager_rank": parameters.outer.rank,
            "total_shards": parameters.genesis.total_shards,
        }
    )
    _check_rates(parameters)
    if parameters.stage_count > parameters.architecture.layer_count:
        raise ValueError("stage_count must not exceed layer_count")
    check_digests(parameters.genesis)
    if parameters.genesis.next_merge_id > parameters.architecture.vocabulary_size:
        raise ValueError("next_merge_id must not exceed vocabulary_size")
    if len(parameters.seeds) > MAX_SEEDS:
        raise ValueError(f"seeds must be at most {MAX_SEEDS} addresses")
    for seed in parameters.seeds:
        checked_multiaddr(seed)
    if (objection := scheme_objection(parameters.outer)) is not None:
        raise ValueError(objection)
    if parameters.routing == "balanced" and parameters.admission == "strangers":
        raise ValueError(
            "routing must be lanes where strangers are admitted: balanced routing would let one hostile node touch "
            "the work of every driver"
        )
    if parameters.outer.strategy == "averaging" and parameters.admission == "strangers":
        raise ValueError(
            "strategy must not be averaging where strangers are admitted: the mean of gradients has no protection from "
            "liars; use diloco"
        )


def scheme_objection(outer: OuterOptimization) -> str | None:
    """Return the reason why this strategy, codec and aggregator cannot be combined, or None if they can."""
    if outer.strategy == "averaging":
        return _averaging_objection(outer)
    if (objection := _objection_to_names_of_averaging(outer)) is not None:
        return objection
    if outer.strategy == "sparta" and outer.codec == "topk":
        return (
            "codec must not be topk with strategy sparta: the weights of a slice become what is agreed on, so what "
            "top-k holds back would be lost until the slice's next turn; use codec = int8 or int4"
        )
    if outer.codec == "topk" and outer.aggregator != "mean":
        return (
            f"codec must not be topk with aggregator {outer.aggregator}: of sparse contributions most numbers are zero "
            "at every place, so what is trimmed or in the middle says nothing about them; use aggregator = mean"
        )
    return None


def _averaging_objection(outer: OuterOptimization) -> str | None:
    """The reason why gradients cannot be averaged with these settings, or None."""
    if outer.aggregator != "mean":
        return (
            f"aggregator must not be {outer.aggregator} with strategy averaging: gradients are mostly noise, and of "
            "factors the middle of each number says nothing about their product; use aggregator = mean"
        )
    if outer.codec == "topk":
        return "codec must not be topk with strategy averaging: use codec = powersgd"
    if outer.overlap:
        return "overlap must be false with strategy averaging: training can only continue after the step has ended"
    return None


def _objection_to_names_of_averaging(outer: OuterOptimization) -> str | None:
    """The reason why settings for averaged gradients do not fit another strategy, or None."""
    if outer.codec == "powersgd":
        return (
            f"codec must not be powersgd with strategy {outer.strategy}: its factors take two rounds of one gradient; "
            "use strategy = averaging, or codec = int8"
        )
    if (outer.averaged_sequences, outer.rank) != (OuterOptimization.averaged_sequences, OuterOptimization.rank):
        return "averaging_target_batch_size and averager_rank are for strategy averaging alone"
    return None


def check_digests(pins: GenesisPins) -> None:
    """Check the digests, which become parts of file names and addresses. Raises ValueError that names the field."""
    hex_field(pins.root, SHA256_BYTES, "root")
    hex_field(pins.tokenizer_sha256, SHA256_BYTES, "tokenizer_sha256")
    if pins.signing_key is not None:
        hex_field(pins.signing_key, PUBLIC_KEY_BYTES, "signing_key")


def check_architecture(shape: Architecture) -> None:
    """Raise ValueError that names a size that no model can have."""
    _check_at_least_one(
        {
            "hidden_size": shape.hidden_size,
            "layer_count": shape.layer_count,
            "head_count": shape.head_count,
            "key_value_head_count": shape.key_value_head_count,
            "feed_forward_size": shape.feed_forward_size,
            "vocabulary_size": shape.vocabulary_size,
            "sequence_length": shape.sequence_length,
        }
    )
    if shape.hidden_size % shape.head_count or shape.head_count % shape.key_value_head_count:
        raise ValueError("head_count must divide hidden_size, and key_value_head_count must divide head_count")
    if shape.head_size % 2:
        raise ValueError("hidden_size / head_count must be even")


def _check_at_least_one(counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1")


def _check_rates(parameters: RunParameters) -> None:
    shape, inner, outer = parameters.architecture, parameters.inner, parameters.outer
    positive = {
        "rope_theta": shape.rope_theta,
        "norm_epsilon": shape.norm_epsilon,
        "inner learning_rate": inner.learning_rate,
        "max_grad_norm": inner.max_grad_norm,
        "outer learning_rate": outer.learning_rate,
        "max_round_seconds": outer.max_round_seconds,
    }
    for name, value in positive.items():
        if not value > 0:  # also refuses NaN
            raise ValueError(f"{name} must be more than 0")
    below_one = {"beta1": inner.beta1, "beta2": inner.beta2, "outer momentum": outer.momentum}
    for name, value in below_one.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1)")
    if not 0 <= outer.trim_fraction < 0.5:
        raise ValueError("trim_fraction must be in [0, 0.5)")
    if not 0 <= inner.final_fraction <= 1:
        raise ValueError("final_fraction must be in [0, 1]")
    if not inner.weight_decay >= 0:
        raise ValueError("weight_decay must not be negative")


MAX_TEXT_CHARACTERS = 256
MAX_LIST_ITEMS = 64
_MAX_INTEGER = 2**63 - 1
_Value = TypeVar("_Value")
_Field = dataclasses.Field[Any]


class RunParametersError(DataError):
    """The parameters of a run are malformed; the message names the field."""


def run_parameters_to_json(parameters: RunParameters) -> Mapping[str, JsonValue]:
    """Return every field by name. Real numbers are written as floats even if they are whole."""
    return _object_of(parameters)


def run_parameters_from_json(value: JsonValue) -> RunParameters:
    """Read run parameters strictly. Raises RunParametersError that names a missing, unknown or wrong field."""
    try:
        parameters = _read_object(RunParameters, value, "run parameters")
        check_parameters(parameters)
    except ValueError as error:
        raise RunParametersError(f"The parameters of the run cannot be used: {error}.") from None
    return parameters


def genesis_pins_from_json(value: JsonValue) -> GenesisPins:
    """Read the pins alone. Raises RunParametersError that names a missing, unknown or wrong field."""
    try:
        pins = _read_object(GenesisPins, value, "genesis")
        check_digests(pins)
    except ValueError as error:
        raise RunParametersError(f"The pinned data cannot be used: {error}.") from None
    return pins


def architecture_from_json(value: JsonValue) -> Architecture:
    """Read the architecture alone. Raises RunParametersError that names a missing or wrong size."""
    try:
        shape = _read_object(Architecture, value, "architecture")
        check_architecture(shape)
    except ValueError as error:
        raise RunParametersError(f"The architecture cannot be used: {error}.") from None
    return shape


def _object_of(value: Any) -> dict[str, JsonValue]:
    hints = _kinds_of(cast("type[Any]", type(value)))
    written: dict[str, JsonValue] = {}
    for item in dataclasses.fields(value):
        kind = hints[item.name]
        entry = _json_of(getattr(value, item.name), kind)
        if not (_came_later(item) and entry == _json_of(_default_of(item), kind)):
            written[item.name] = entry
    return written


@cache
def _kinds_of(kind: type[Any]) -> Mapping[str, Any]:
    """The types of a dataclass's fields. Cached, because get_type_hints compiles the annotations."""
    return get_type_hints(kind)


def _json_of(value: Any, kind: Any) -> JsonValue:
    if dataclasses.is_dataclass(value):
        return _object_of(value)
    if isinstance(value, tuple):
        return list(cast("Sequence[JsonValue]", value))
    # 1 and 1.0 are equal parameters, so they must have equal bytes and one run id
    return float(value) if kind is float else value


def _came_later(item: _Field) -> bool:
    return "since" in item.metadata


def _default_of(item: _Field) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _read_object(kind: type[_Value], value: JsonValue, where: str) -> _Value:
    hints = _kinds_of(kind)
    items = dataclasses.fields(cast("Any", kind))
    optional = {item.name for item in items if _came_later(item)}
    fields = object_fields(value, {item.name for item in items} - optional, optional, where)
    return kind(**{name: _read_value(hints[name], fields[name], name) for name in fields})


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
    if get_origin(kind) is tuple:
        return _read_list(get_args(kind)[0], value, where)
    return _read_plain(kind, value, where)


def _read_plain(kind: Any, value: JsonValue, where: str) -> bool | int | float | str:
    if kind is float:
        return number_field(value, where)
    if kind is str:
        return text_field(value, MAX_TEXT_CHARACTERS, where)
    if kind is bool:
        return flag_field(value, where)
    if kind is not int:
        raise TypeError(f"run parameters have no reader for {kind}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INTEGER:
        raise ValueError(f"{where} must be a whole number from 0 to {_MAX_INTEGER}")
    return value


def _read_list(kind: Any, value: JsonValue, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MAX_LIST_ITEMS:
        raise ValueError(f"{where} must be a list of at most {MAX_LIST_ITEMS} items")
    return tuple(_read_value(kind, item, f"an item of {where}") for item in value)


MAX_RUN_PARAMETERS_BYTES = 64 * 1024


def run_id(owner_public_key: bytes, parameters: RunParameters) -> RunId:
    """Return SHA-256(owner key, canonical JSON of the initial parameters), 64 hex digits."""
    return RunId(hash_parts(owner_public_key, canonical_json(run_parameters_to_json(parameters))).hex())


@dataclass(frozen=True)
class SignedRunParameters:
    """A run's parameters and its owner's signature over them."""

    parameters: RunParameters
    owner_public_key: bytes
    signature: bytes

    @property
    def owner_wallet_id(self) -> WalletId:
        """The wallet that signed, from the public key."""
        return wallet_id_of(self.owner_public_key)

    @classmethod
    def sign(cls, owner: Signer, parameters: RunParameters) -> SignedRunParameters:
        """Sign as the run's owner. Raises RunParametersError for parameters that no node would accept."""
        run_parameters_from_json(run_parameters_to_json(parameters))
        return cls(parameters, owner.public_key, owner.sign(_message(parameters)))

    def to_value(self) -> Mapping[str, JsonValue]:
        """Return the JSON object, with the key and the signature in hex."""
        return {
            "parameters": run_parameters_to_json(self.parameters),
            "owner_public_key": self.owner_public_key.hex(),
            "signature": self.signature.hex(),
        }

    def to_json(self) -> bytes:
        """Return `to_value` as canonical JSON."""
        return canonical_json(self.to_value())

    @classmethod
    def from_json(cls, data: bytes) -> SignedRunParameters:
        """Read and verify. Raises RunParametersError if malformed, SignatureError if the owner did not sign."""
        try:
            value = parse_json(data, MAX_RUN_PARAMETERS_BYTES)
        except ValueError as error:
            raise RunParametersError(f"The signed parameters of the run cannot be read: {error}.") from None
        return cls.from_value(value)

    @classmethod
    def from_value(cls, value: JsonValue) -> SignedRunParameters:
        """Read and verify a JSON object. Raises the same errors as `from_json`."""
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
