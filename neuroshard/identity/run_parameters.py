"""The parameters of a run: their allowed values, their JSON form, the run id and the owner's signature.

The JSON form is hashed, signed and sent. A field with `since` in its metadata is left out while it has its default, so
that runs older than the field keep their id and their signature. Limits of this computer are checked elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.config.run_parameters import GenesisPins, OuterOptimization, RunParameters
from neuroshard.decoders import analysed, read_json
from neuroshard.errors import DataError
from neuroshard.identity.signing import Signer, hash_parts, purpose_message, verify_signature
from neuroshard.identity.strict_json import canonical_json
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import Architecture, HexKey, HexSignature, JsonValue, RunId, WalletId


def check_parameters(parameters: RunParameters) -> None:
    """Raise ValueError that names a field whose value does not fit the others."""
    check_architecture(parameters.architecture)
    if parameters.stage_count > parameters.architecture.layer_count:
        raise ValueError("stage_count must not exceed layer_count")
    _check_stage_layers(parameters)
    _check_subspace(parameters)
    if parameters.genesis.next_merge_id > parameters.architecture.vocabulary_size:
        raise ValueError("next_merge_id must not exceed vocabulary_size")
    for seed in parameters.seeds:
        checked_multiaddr(seed)
    branch = parameters.branch
    if branch is not None and {len(branch.roots), len(branch.sequences)} not in ({0}, {parameters.stage_count}):
        raise ValueError("branch names a root and a number of sequences for each stage, or none")
    _check_authority(parameters)
    if (objection := scheme_objection(parameters.outer)) is not None:
        raise ValueError(objection)
    if parameters.routing == "balanced" and parameters.admits_strangers:
        raise ValueError(
            "routing must be lanes where strangers are admitted: balanced routing would let one hostile node touch "
            "the work of every driver"
        )
    if parameters.inner.optimizer == "muon" and parameters.outer.strategy == "averaging":
        raise ValueError(
            "inner.optimizer must be adamw with strategy averaging: all replicas compute the step of AdamW on the "
            "averaged gradient"
        )
    if parameters.outer.codec == "topk" and parameters.admits_strangers:
        raise ValueError(
            "codec must not be topk where strangers are admitted: its rule is the mean of all, which has no protection "
            "from liars; use codec = int8 or int4"
        )
    if parameters.outer.strategy == "averaging" and parameters.admits_strangers:
        raise ValueError(
            "strategy must not be averaging where strangers are admitted: the mean of gradients has no protection from "
            "liars; use diloco"
        )


def _check_authority(parameters: RunParameters) -> None:
    keys = parameters.authority
    if (parameters.admission == "admitted") != bool(keys):
        raise ValueError(
            "authority names the keys of the organisers, so admission = admitted needs at least one key there, and "
            "other runs have none"
        )
    if len(set(keys)) != len(keys):
        raise ValueError("authority names a key twice")


def _check_stage_layers(parameters: RunParameters) -> None:
    layers = parameters.stage_layers
    if layers and len(layers) != parameters.stage_count:
        raise ValueError(f"stage_layers has {len(layers)} numbers, but there are {parameters.stage_count} stages")
    if layers and sum(layers) != parameters.architecture.layer_count:
        raise ValueError(
            f"the stages have {sum(layers)} layers in all, but layer_count is {parameters.architecture.layer_count}"
        )


def _check_subspace(parameters: RunParameters) -> None:
    shape = parameters.architecture
    if shape.subspace_rank == 0:
        if parameters.subspace_sha256:
            raise ValueError("subspace_sha256 is given, but subspace_rank is 0: there is no subspace")
        return
    if parameters.stage_count == 1:
        raise ValueError(
            f"subspace_rank = {shape.subspace_rank} compresses activations between stages, but there is one stage only"
        )
    layers = parameters.stage_layers
    tail = layers[-1] if layers else shape.layer_count // parameters.stage_count
    if shape.free_blocks > tail:
        raise ValueError(
            f"free_blocks = {shape.free_blocks} is more than the {tail} layers of the last stage: no stage may end "
            "after a layer that leaves the subspace"
        )


SMALLEST_RANK = 8
LARGEST_BASIS = 2**23  # numbers; a minute of work


def _check_rank(shape: Architecture) -> None:
    rank, width = shape.subspace_rank, shape.hidden_size
    if rank == 0:
        if shape.free_blocks:
            raise ValueError(f"free_blocks = {shape.free_blocks} needs subspace_rank, which is 0")
        return
    if not SMALLEST_RANK <= rank <= width // 2:
        raise ValueError(
            f"subspace_rank = {rank} must be in {SMALLEST_RANK}..{width // 2}, half of hidden_size {width}; 0 means no "
            "subspace"
        )
    if rank * width > LARGEST_BASIS:
        raise ValueError(
            f"subspace_rank = {rank} with hidden_size {width} gives a basis of {rank * width:,} numbers, more than "
            f"{LARGEST_BASIS:,}"
        )
    if shape.norm_reorder and shape.trainable_rmsnorm:
        raise ValueError(
            "norm_reorder with trained scales leaves the subspace: with subspace_rank use trainable_rmsnorm = false or "
            "norm_reorder = false"
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
        return "codec must not be topk with strategy averaging: use averager_rank, or codec = int8"
    if outer.rank and outer.codec != "fp32":
        return f"codec must not be {outer.codec} with averager_rank: factors travel exactly; use codec = fp32"
    if outer.overlap:
        return "overlap must be false with strategy averaging: training can only continue after the step has ended"
    return None


def _objection_to_names_of_averaging(outer: OuterOptimization) -> str | None:
    """The reason why settings for averaged gradients do not fit another strategy, or None."""
    if (outer.averaged_sequences, outer.rank) != (OuterOptimization.averaged_sequences, OuterOptimization.rank):
        return "averaging_target_batch_size and averager_rank are for strategy averaging alone"
    return None


def check_architecture(shape: Architecture) -> None:
    """Raise ValueError for sizes that do not fit each other."""
    if shape.hidden_size % shape.head_count or shape.head_count % shape.key_value_head_count:
        raise ValueError("head_count must divide hidden_size, and key_value_head_count must divide head_count")
    if shape.head_size % 2:
        raise ValueError("hidden_size / head_count must be even")
    _check_rank(shape)


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
        parameters = _declared(value, RunParameters)
        check_parameters(parameters)
    except ValueError as error:
        raise RunParametersError(f"The parameters of the run cannot be used: {error}.") from None
    return parameters


def genesis_pins_from_json(value: JsonValue) -> GenesisPins:
    """Read the pins alone. Raises RunParametersError that names a missing, unknown or wrong field."""
    try:
        return _declared(value, GenesisPins)
    except ValueError as error:
        raise RunParametersError(f"The pinned data cannot be used: {error}.") from None


def architecture_from_json(value: JsonValue) -> Architecture:
    """Read the architecture alone. Raises RunParametersError that names a missing or wrong size."""
    try:
        shape = _declared(value, Architecture)
        check_architecture(shape)
    except ValueError as error:
        raise RunParametersError(f"The architecture cannot be used: {error}.") from None
    return shape


def architecture_to_json(architecture: Architecture) -> Mapping[str, JsonValue]:
    """Return every size by name, and the options that differ from their default."""
    return _object_of(architecture)


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


def _declared(value: JsonValue, form: type[_Value]) -> _Value:
    """Convert a JSON object to a dataclass within its bounds. Raises ValueError that names the field."""
    _check_names(form, value, "$")
    return msgspec.convert(value, analysed(form))


def _check_names(kind: Any, value: JsonValue, path: str) -> None:
    """Raise ValueError for faults that msgspec tolerates in dataclasses, and list the choices of a Literal.

    msgspec accepts unknown fields, and missing ones that have a default. Only fields that came later may be missing.
    """
    if value is not None and get_origin(kind) is UnionType:
        kind = next((choice for choice in get_args(kind) if dataclasses.is_dataclass(choice)), kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = _kinds_of(cast("type[Any]", kind))
        needed = {item.name for item in dataclasses.fields(kind) if not _came_later(item)}
        for name in sorted(needed - value.keys()):
            raise ValueError(f"Object missing required field `{name}` - at `{path}`")
        for name in sorted(value.keys() - hints.keys()):
            raise ValueError(f"Object contains unknown field `{name[:40]}` - at `{path}`")
        for name, entry in value.items():
            _check_names(hints[name], entry, f"{path}.{name}")
    elif get_origin(kind) is Literal and value not in get_args(kind):
        raise ValueError(f"Expected one of {', '.join(map(str, get_args(kind)))} - at `{path}`")


MAX_RUN_PARAMETERS_BYTES = 64 * 1024


def run_id(owner_public_key: bytes, parameters: RunParameters) -> RunId:
    """Return SHA-256(owner key, canonical JSON of the initial parameters), 64 hex digits."""
    return RunId(hash_parts(owner_public_key, canonical_json(run_parameters_to_json(parameters))).hex())


class SignedForm(Struct, frozen=True, forbid_unknown_fields=True):
    """JSON form of SignedRunParameters."""

    parameters: dict[str, Any]
    owner_public_key: HexKey
    signature: HexSignature


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

    @property
    def form(self) -> SignedForm:
        """The JSON form."""
        written = dict(run_parameters_to_json(self.parameters))
        return SignedForm(written, self.owner_public_key.hex(), self.signature.hex())

    def to_json(self) -> bytes:
        """Return `form` as canonical JSON."""
        return canonical_json(msgspec.to_builtins(self.form))

    @classmethod
    def from_json(cls, data: bytes) -> SignedRunParameters:
        """Read and verify. Raises RunParametersError if malformed, SignatureError if the owner did not sign."""
        try:
            form = read_json(data, SignedForm, MAX_RUN_PARAMETERS_BYTES)
        except ValueError as error:
            raise RunParametersError(f"The signed parameters of the run cannot be read: {error}.") from None
        return cls.from_form(form)

    @classmethod
    def from_form(cls, form: SignedForm) -> SignedRunParameters:
        """Read and verify the JSON form. Raises the same errors as `from_json`."""
        owner, signature = bytes.fromhex(form.owner_public_key), bytes.fromhex(form.signature)
        parameters = run_parameters_from_json(form.parameters)
        verify_signature(owner, _message(parameters), signature)
        return cls(parameters, owner, signature)


def _message(parameters: RunParameters) -> bytes:
    return purpose_message("run-parameters", run_parameters_to_json(parameters))
