"""The file that describes a new run: TOML or YAML with known names, and the parameters that follow from it."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any, cast

import yaml

from neuroshard.config.loading import MAX_CONFIG_BYTES
from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.data.tokenizer import FIRST_MERGE_ID
from neuroshard.errors import StorageError, UsageError
from neuroshard.identity import (
    RunParametersError,
    run_parameters_from_json,
    run_parameters_to_json,
)
from neuroshard.model.architecture import plan_of
from neuroshard.model.model_class import export_objection
from neuroshard.model.subspace_basis import basis_sha256, subspace_basis
from neuroshard.optim.schedule import scaled_learning_rate
from neuroshard.runs.architecture_table import (
    ARCHITECTURE_EXAMPLE,
    ARCHITECTURE_NAMES,
    config_entries,
    read_architecture,
)
from neuroshard.runs.proposal import STAGED_MICROBATCHES, Proposal, run_parameters
from neuroshard.runs.stage_layers import CUT_NAMES, PARTS, with_stage_layers
from neuroshard.types import ID_BYTES, Architecture, JsonValue


@dataclass(frozen=True)
class LaterName:
    """A name that is reserved for a feature of a later version."""

    feature: str
    today: str | int | None = None  # the value that means this version's behaviour; None if there is none


LATER_NAMES: Mapping[str, LaterName] = {
    "matchmaking_time": LaterName("matchmaking with a time limit of the run's"),
    "averaging_timeout": LaterName("a time limit of the run's for one averaging"),
    "sparse_avg": LaterName("sparse averaging of another share than the 5 % of strategy sparta", 0),
    "average_state_every": LaterName("averaging of the state, which all replicas hold bit for bit,", 0),
    "max_allowed_stale": LaterName("another number of rounds to catch up with", 5),  # vote_log.KEPT_STEPS
}
_HINT = "Leave the name out."


def check_not_later(name: str, value: JsonValue) -> None:
    """Raises UsageError if the entry asks for a feature that this version does not have."""
    if (name, value) == ("codec", "powersgd"):
        raise UsageError(
            "codec: powersgd is not an encoding.",
            'Use strategy = "averaging", codec = "fp32" and averager_rank, the rank of the factors.',
        )
    later = LATER_NAMES.get(name)
    if later is not None and not _is_today(later, value):
        hint = _HINT if later.today is None else f"Leave the name out; {name} = {later.today!r} means the same."
        raise UsageError(f"{name}: {later.feature} is not in this version.", hint)


def _is_today(later: LaterName, value: JsonValue) -> bool:
    return later.today is not None and not isinstance(value, bool) and value == later.today


class _Loader(yaml.SafeLoader):
    """A safe loader that rejects duplicate names and reads numbers such as 1e-4."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[:60]} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-4 as text, because it has no dot.
_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def read_yaml(text: str) -> dict[str, JsonValue]:
    """Parse a YAML document into names and values. Raises ValueError with the place of the error."""
    try:
        value: Any = yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
        raise ValueError("names and values are needed")
    return cast("dict[str, JsonValue]", value)


BATCH_SIZE = 4
# Friends tolerate no liar, and trimming discards honest work: of three contributions it leaves the middle one. The
# gates still judge them, and each is clipped to the median norm.
OF_STRANGERS: Mapping[str, JsonValue] = {"aggregator": "trimmed_mean", "trim_fraction": 0.25}
# Name in the file -> field of the run parameters. docs/RUNS.md explains each name.
NAMES: Mapping[str, str] = {
    "name": "name",
    "num_stages": "stage_count",
    "stage_layers": "stage_layers",
    "batch_size": "batch_size",
    "sequences_per_step": "sequences_per_step",
    "initial_weights_seed": "initial_weights_seed",
    "inner_steps": "outer.inner_steps",
    "interval": "outer.interval",
    "round_share": "outer.round_share",
    "inner_optimizer": "inner.optimizer",
    "inner_lr": "inner.learning_rate",
    "beta1": "inner.beta1",
    "beta2": "inner.beta2",
    "weight_decay": "inner.weight_decay",
    "max_grad_norm": "inner.max_grad_norm",
    "warmup_steps": "inner.warmup_steps",
    "schedule": "inner.schedule",
    "decay_steps": "inner.decay_steps",
    "final_fraction": "inner.final_fraction",
    "outer_lr": "outer.learning_rate",
    "outer_momentum": "outer.momentum",
    "outer_choice": "outer.choice",
    "lone_outer": "outer.lone_outer",
    "aggregator": "outer.aggregator",
    "trim_fraction": "outer.trim_fraction",
    "codec": "outer.codec",
    "strategy": "outer.strategy",
    "averaging_target_batch_size": "outer.averaged_sequences",
    "averager_rank": "outer.rank",
    "max_round_seconds": "outer.max_round_seconds",
    "overlap": "outer.overlap",
    "admission": "admission",
    "authority": "authority",
    "holds_from_outer_step": "holds_from_outer_step",
    "seeds": "seeds",
    "wire_precision": "wire_precision",
    "wire_precision_gradients": "wire_precision_gradients",
    "data_plane": "data_plane",
    "routing": "routing",
    "subspace_sha256": "subspace_sha256",
    "subspace_cache_mb": "subspace_cache_mb",
}
# These are checked together, because the allowed values of each depend on the others.
ADMISSION = frozenset({"admission", "authority"})
SCHEME = frozenset({"aggregator", "codec", "strategy", "averaging_target_batch_size", "averager_rank"})
TOGETHER = (SCHEME, CUT_NAMES, ADMISSION, frozenset({"architecture", "subspace_sha256"}))
TABLES: Mapping[str, frozenset[str]] = {
    "architecture": ARCHITECTURE_NAMES,
    "genesis": frozenset(item.name for item in fields(GenesisPins)),
}
RunConfig = Mapping[str, JsonValue]  # by name in the file; types of the values are not checked yet


def read_run_config(path: Path) -> RunConfig:
    """Read the file's entries; all names are in NAMES or TABLES. Raises UsageError with the line or name at fault.

    Entries with reserved names are left out if their value means this version's behaviour.
    """
    kinds = {".toml": _read_toml, ".yaml": read_yaml, ".yml": read_yaml}
    read = kinds.get(path.suffix.lower())
    if read is None:
        raise UsageError(f"{path} is neither a .toml nor a .yaml file.", "Give the run as run.toml or run.yaml.")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise UsageError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes.", "A run needs a few lines.")
        config = read(data.decode("utf-8-sig"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be used: {error}.", "Correct the file.") from error
    _check_names(config, path)
    for name, value in config.items():
        check_not_later(name, value)
    return {name: value for name, value in config.items() if name not in LATER_NAMES}


def entry_of(name: str, text: str) -> dict[str, JsonValue]:
    """One entry as typed in a shell: a value as in TOML, or a text without quotes. Raises UsageError for the name."""
    _check_name(name, [*NAMES, *PARTS, *LATER_NAMES, *TABLES], "")
    try:
        value = _read_toml(f"value = {text}")["value"]
    except ValueError:
        value = text
    check_not_later(name, value)
    return {name: value}


def new_parameters(config: RunConfig, pins: GenesisPins) -> RunParameters:
    """Build the first version of a run on this data. Raises UsageError with the entry that cannot be used."""
    if "architecture" not in config:
        raise UsageError("The run names no architecture.", ARCHITECTURE_EXAMPLE)
    shipped = config_entries(config["architecture"])
    if CUT_NAMES.isdisjoint(config):
        config = {**{name: value for name, value in shipped.items() if name in CUT_NAMES}, **config}
    config = with_stage_layers(config)
    if "holds_from_outer_step" in config:
        raise UsageError("holds_from_outer_step is for a later version of a run.", "Use it with --update.")
    architecture = read_architecture(config["architecture"], pins.next_merge_id)
    if "genesis" not in config and architecture.vocabulary_size >= FIRST_MERGE_ID:  # fewer ids than the data set has
        pins = replace(pins, next_merge_id=min(pins.next_merge_id, architecture.vocabulary_size))
    optimizer = "muon" if config.get("inner_optimizer") == "muon" else "adamw"  # apply_config reports any other value
    inner = InnerOptimization(learning_rate=scaled_learning_rate(architecture.hidden_size, optimizer))
    # The subspace comes with the table `architecture`, after the stages, without which it is refused.
    whole = replace(architecture, subspace_rank=0, free_blocks=0)
    base = run_parameters(Proposal(whole, BATCH_SIZE, inner), pins, name="run")
    derived: dict[str, JsonValue] = {}
    batch, is_staged = config.get("batch_size", BATCH_SIZE), config.get("num_stages", 1) != 1
    if isinstance(batch, int):  # apply_config reports any other type
        derived["sequences_per_step"] = batch * (STAGED_MICROBATCHES if is_staged else 1)
    if is_staged:
        derived["wire_precision"] = "int8"
    if config.get("admission") in {"strangers", "admitted"}:
        derived |= OF_STRANGERS
    made = apply_config(base, {**config, **{key: value for key, value in derived.items() if key not in config}})
    return made if made.architecture.subspace_rank == 0 else _with_basis(made)


def _with_basis(parameters: RunParameters) -> RunParameters:
    """Add the digest of the basis of the subspace. Raises UsageError if the file names another one."""
    shape = parameters.architecture
    found = basis_sha256(subspace_basis(shape.hidden_size, shape.subspace_rank, parameters.initial_weights_seed))
    if parameters.subspace_sha256 not in {"", found}:
        raise UsageError(
            f"subspace_sha256 = {parameters.subspace_sha256[:16]}.. is not the digest of this run's basis, {found}.",
            "Leave the name out, or use the initial_weights_seed that belongs to the digest.",
        )
    return replace(parameters, subspace_sha256=found)


def apply_config(parameters: RunParameters, config: RunConfig) -> RunParameters:
    """Replace parameters by the file's entries. Raises UsageError with the wrong entry.

    A table `architecture` gets defaults, among them the parameters' vocabulary; a table `genesis` must be complete.
    """
    config = with_stage_layers(config)
    groups = [{key: value for key, value in config.items() if key in names} for names in TOGETHER]
    rest = [{key: value} for key, value in config.items() if not any(key in names for names in TOGETHER)]
    for entries in filter(None, [*groups, *rest]):
        written = copy.deepcopy(cast("dict[str, Any]", run_parameters_to_json(parameters)))
        for key, value in entries.items():
            if key == "architecture":
                last_stage = len(plan_of(parameters)[-1])
                written["architecture"] = asdict(read_architecture(value, parameters.genesis.next_merge_id, last_stage))
            else:
                *outer, name = NAMES.get(key, key).split(".")
                target = written[outer[0]] if outer else written
                target[name] = value
        parameters = _checked(entries, written)
    return parameters


def model_warnings(config: RunConfig) -> tuple[str, ...]:
    """Warnings about the model of a new run. Raises UsageError with the entry that cannot be used."""
    if "architecture" not in config:
        return ()
    shape = read_architecture(config["architecture"], FIRST_MERGE_ID)
    warnings = [objection] if (objection := export_objection(shape)) is not None else []
    return (*warnings, _subspace_warning(shape)) if shape.subspace_rank else tuple(warnings)


_BLOCK = 64  # values that share a scale on the wire
HOME_UPLOAD_MBIT = 20  # per second, of a usual line at home


def _subspace_warning(shape: Architecture) -> str:
    """Compare the bytes of the subspace with those of the plain model in int8 and in int4."""
    rank, width = shape.subspace_rank, shape.hidden_size
    compressed = rank + 4 * ceil(rank / _BLOCK) + ID_BYTES
    int8, int4 = width + 4 * ceil(width / _BLOCK), ceil(width / 2) + 2 * ceil(width / _BLOCK)
    # a stage in the middle sends activations to the next stage and gradients, which have no ids, to the one before
    seconds = [each * 8 / HOME_UPLOAD_MBIT for each in (2 * compressed - ID_BYTES, 2 * int8, 2 * int4)]
    return (
        f"subspace_rank = {rank} sends {compressed:,} bytes per token in int8 instead of {int8:,}, and of {int4:,} in "
        f"int4 without it. Over {HOME_UPLOAD_MBIT} Mbit/s up, a million tokens take {seconds[0]:,.0f} s instead of "
        f"{seconds[1]:,.0f} s, and of {seconds[2]:,.0f} s in int4. It learns more slowly: the reference with width "
        "1,024 and rank 160 needed 3.1 times the tokens for the same loss. Use it only on lines where int4 is too slow."
    )


LONG_FIXED_INTERVAL = 100  # inner steps
HIGH_MOMENTUM = 0.9


def recipe_warnings(outer: OuterOptimization) -> tuple[str, ...]:
    """Warnings about settings with which several computers were measured to learn less than they could."""
    warnings = list[str]()
    if outer.strategy in {"sparta", "averaging"}:
        return ()
    if outer.interval == "fixed" and outer.inner_steps >= LONG_FIXED_INTERVAL:
        warnings.append(
            f'interval = "fixed" with inner_steps = {outer.inner_steps}: with 500 from the start, four computers ended '
            "at a loss of 1.819, one computer alone at 1.835, and four with growing intervals at 1.646. Use interval = "
            '"growing".'
        )
    if outer.momentum >= HIGH_MOMENTUM:
        warnings.append(
            f"outer_momentum = {outer.momentum:g}: with few rounds, 0.9 made each round 0.06 to 0.15 worse in loss "
            f"than the plain mean. Use outer_momentum = {OuterOptimization.momentum:g}."
        )
    if outer.learning_rate > 1:
        warnings.append(
            f"outer_lr = {outer.learning_rate:g}: above 1, every round carries the weights past the mean of the "
            f"computers, and training broke. Use outer_lr = {OuterOptimization.learning_rate:g}."
        )
    return tuple(warnings)


def _checked(entries: RunConfig, written: Mapping[str, JsonValue]) -> RunParameters:
    """Parse parameters that differ from valid ones by `entries` only, so an error can show the names in the file."""
    try:
        return run_parameters_from_json(written)
    except RunParametersError as error:
        reason = error.message.removeprefix("The parameters of the run cannot be used: ")
        shown = ", ".join(
            f"{key} = {value!r}"[:100] if isinstance(value, str | int | float) else key
            for key, value in entries.items()
        )
        raise UsageError(f"{shown} cannot be used: {reason}", "Correct it in the file of the run.") from None


def _read_toml(text: str) -> dict[str, JsonValue]:
    return cast("dict[str, JsonValue]", tomllib.loads(text))


def _check_names(config: RunConfig, path: Path) -> None:
    for key, value in config.items():
        _check_name(key, [*NAMES, *PARTS, *LATER_NAMES, *TABLES], f"{path}: ")
        if key in TABLES and isinstance(value, Mapping):
            for name in value:
                _check_name(str(name), sorted(TABLES[key]), f"{path}: {key}.")


def _check_name(name: str, known: list[str], place: str) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Known are: {', '.join(known)}."
        raise UsageError(f"Unknown name {place}{name[:60]}.", hint)
