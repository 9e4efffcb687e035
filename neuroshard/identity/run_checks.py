"""What the numbers of a run may be, whoever signed them. Limits of this computer are checked elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.config.run_parameters import MAX_SEEDS, GenesisPins, OuterOptimization, RunParameters
from neuroshard.identity.fields import hex_field
from neuroshard.identity.signing import PUBLIC_KEY_BYTES
from neuroshard.types import Architecture

SHA256_BYTES = 32


def check_parameters(parameters: RunParameters) -> None:
    """Raises ValueError that names the field that no run can have."""
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
    """Why this strategy, codec and aggregator cannot be together, or None (DESIGN 4.5)."""
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
    """Why gradients cannot be averaged so."""
    if outer.aggregator != "mean":
        return (
            f"aggregator must not be {outer.aggregator} with strategy averaging: gradients are mostly noise, and of "
            "factors the middle of each number says nothing about their product; use aggregator = mean"
        )
    if outer.codec == "topk":
        return "codec must not be topk with strategy averaging: use codec = powersgd"
    if outer.overlap:
        return "overlap must be false with strategy averaging: there is nothing to go on from before a step has ended"
    return None


def _objection_to_names_of_averaging(outer: OuterOptimization) -> str | None:
    """Why what belongs to averaged gradients is of no use in another strategy."""
    if outer.codec == "powersgd":
        return (
            f"codec must not be powersgd with strategy {outer.strategy}: its factors take two rounds of one gradient; "
            "use strategy = averaging, or codec = int8"
        )
    if (outer.averaged_sequences, outer.rank) != (OuterOptimization.averaged_sequences, OuterOptimization.rank):
        return "averaging_target_batch_size and averager_rank are for strategy averaging alone"
    return None


def check_digests(pins: GenesisPins) -> None:
    """Digests become parts of file names and addresses. Raises ValueError that names the field."""
    hex_field(pins.root, SHA256_BYTES, "root")
    hex_field(pins.tokenizer_sha256, SHA256_BYTES, "tokenizer_sha256")
    if pins.signing_key is not None:
        hex_field(pins.signing_key, PUBLIC_KEY_BYTES, "signing_key")


def check_architecture(shape: Architecture) -> None:
    """Raises ValueError that names the size that no model can have."""
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
        if not value > 0:  # also refuses what is not a number
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
