"""The table `architecture` of a run's file: a model by depth or by sizes, with our names or those of known programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

from neuroshard.errors import UsageError
from neuroshard.identity import RunParametersError, architecture_from_json
from neuroshard.model.architecture import architecture_for
from neuroshard.model.named_configs import named_config
from neuroshard.runs.proposal import SEQUENCE_LENGTH
from neuroshard.types import Architecture, JsonValue

ARCHITECTURE_EXAMPLE = "For example, in TOML: architecture = { depth = 8 }"
# Names in Llama's and other programs -> our field.
OTHER_NAMES: Mapping[str, str] = {
    "hidden_dim": "hidden_size",
    "n_layers": "layer_count",
    "n_heads": "head_count",
    "n_kv_heads": "key_value_head_count",
    "vocab_size": "vocabulary_size",
    "max_seq_len": "sequence_length",
    "norm_eps": "norm_epsilon",
    "depth_init": "initialisation",
}
_SWITCHES: Mapping[str, tuple[str, str]] = {"qk_norm": ("none", "head"), "depth_init": ("fan_in", "depth")}
_DERIVING = ("ffn_dim_multiplier", "multiple_of")  # these give the feed-forward size
_COMPRESSING = ("use_compression", "compression_rate")  # these give the rank of the subspace
ARCHITECTURE_NAMES = frozenset(
    {"config", "depth", *_DERIVING, *_COMPRESSING, *OTHER_NAMES, *(item.name for item in fields(Architecture))}
)
MAX_MULTIPLIER = 1_000
MAX_MULTIPLE = 2**20
WIDE = 4096  # the default rate of compression is 100 from this width on; at smaller ones nothing would be left
RATE, RATE_OF_WIDE = 8, 100
MOST_FREE_BLOCKS = 2  # by default


def read_architecture(value: JsonValue, vocabulary_size: int, last_stage: int = MOST_FREE_BLOCKS) -> Architecture:
    """Read an architecture: the model family's sizes for a depth, replaced by sizes that are given by name.

    `last_stage` is its number of layers; a subspace leaves up to two of them free by default. Raises UsageError that
    names the entry.
    """
    if not isinstance(value, Mapping):
        raise UsageError("architecture must be a table.", ARCHITECTURE_EXAMPLE)
    given = _with_config(with_our_names(value))
    depth = given.pop("depth", None)
    try:
        defaults: dict[str, JsonValue] = {
            "vocabulary_size": vocabulary_size,
            "sequence_length": SEQUENCE_LENGTH,
            "rope_theta": Architecture.rope_theta,
            "norm_epsilon": Architecture.norm_epsilon,
        }
        if depth is not None:
            if isinstance(depth, bool) or not isinstance(depth, int):
                raise UsageError(f"architecture.depth must be a whole number, not {depth!r:.40}.", ARCHITECTURE_EXAMPLE)
            defaults = asdict(architecture_for(depth, vocabulary_size, SEQUENCE_LENGTH))
        return architecture_from_json(_with_rank(_with_feed_forward({**defaults, **given}, given), given, last_stage))
    except (ValueError, RunParametersError) as error:
        raise UsageError(f"architecture cannot be used: {error}", ARCHITECTURE_EXAMPLE) from None


def config_entries(architecture: JsonValue) -> dict[str, JsonValue]:
    """Entries of the shipped model that the table names, or none. Raises UsageError for an unknown name."""
    if not isinstance(architecture, Mapping) or "config" not in architecture:
        return {}
    return named_config(architecture["config"])


def _with_config(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Fill up with the entries of the shipped model. Entries of the file replace its own."""
    table = config_entries(given).get("architecture")
    if not isinstance(table, Mapping):
        return given
    if "depth" in given:
        raise UsageError("architecture has config and depth, which both give all sizes.", "Leave one of them out.")
    shipped = with_our_names(table)
    if "feed_forward_size" in given:
        shipped = {name: value for name, value in shipped.items() if name not in _DERIVING}
    if "subspace_rank" in given:
        replaced = (*_COMPRESSING, "free_blocks") if given["subspace_rank"] == 0 else _COMPRESSING
        shipped = {name: value for name, value in shipped.items() if name not in replaced}
    return {**shipped, **{name: value for name, value in given.items() if name != "config"}}


def with_our_names(table: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Rename the entries of other programs. Raises UsageError if two entries set the same field."""
    named: dict[str, JsonValue] = {}
    for name, value in table.items():
        ours = OTHER_NAMES.get(name, name)
        if ours in named:
            twice = [one for one in table if OTHER_NAMES.get(one, one) == ours]
            raise UsageError(f"architecture has {' and '.join(twice)}, which mean the same.", "Leave one of them out.")
        if name in _SWITCHES and isinstance(value, bool):
            named[ours] = _SWITCHES[name][value]
        elif name == "depth_init":
            raise UsageError(f"architecture.depth_init must be true or false, not {value!r:.40}.", "Correct it.")
        else:
            named[ours] = value
    return named


def _with_feed_forward(sizes: dict[str, JsonValue], given: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Replace ffn_dim_multiplier x and multiple_of q by the size q ceil(floor(x floor(8 d / 3)) / q)."""
    multiplier, multiple = sizes.pop("ffn_dim_multiplier", None), sizes.pop("multiple_of", None)
    if multiplier is None and multiple is None:
        return sizes
    if "feed_forward_size" in given:
        raise UsageError(
            "architecture has feed_forward_size and also ffn_dim_multiplier or multiple_of, which give this size.",
            "Name either the size or the two others.",
        )
    x, q, width = 1 if multiplier is None else multiplier, 1 if multiple is None else multiple, sizes.get("hidden_size")
    if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x <= MAX_MULTIPLIER:
        raise ValueError(f"ffn_dim_multiplier must be a number above 0, at most {MAX_MULTIPLIER}, not {x!r:.40}")
    if isinstance(q, bool) or not isinstance(q, int) or not 1 <= q <= MAX_MULTIPLE:
        raise ValueError(f"multiple_of must be a whole number in 1..{MAX_MULTIPLE}, not {q!r:.40}")
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width < 2**31:
        raise ValueError("ffn_dim_multiplier and multiple_of need hidden_size, a whole number")
    return {**sizes, "feed_forward_size": -(-int(x * (8 * width // 3)) // q) * q}


def _with_rank(sizes: dict[str, JsonValue], given: Mapping[str, JsonValue], last_stage: int) -> dict[str, JsonValue]:
    """Replace use_compression and compression_rate r by the rank floor(hidden_size / r), and add the free blocks."""
    used, rate = sizes.pop("use_compression", None), sizes.pop("compression_rate", None)
    rank, width = given.get("subspace_rank"), sizes.get("hidden_size")
    if used is not None and not isinstance(used, bool):
        raise ValueError(f"use_compression must be true or false, not {used!r:.40}")
    if used is False:
        return {**sizes, "subspace_rank": 0, "free_blocks": 0}
    if rate is not None and rank is not None:
        raise ValueError("compression_rate and subspace_rank both give the rank; name one of them")
    if rank is None and (used or rate is not None) and isinstance(width, int):  # a wrong width is reported later
        rate = (RATE_OF_WIDE if width >= WIDE else RATE) if rate is None else rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 2 <= rate <= width:
            raise ValueError(f"compression_rate must be a number of at least 2, at most hidden_size, not {rate!r:.40}")
        rank = int(width // rate)
    if rank is None or rank == 0:
        return sizes
    return {**sizes, "free_blocks": given.get("free_blocks", min(MOST_FREE_BLOCKS, last_stage)), "subspace_rank": rank}
