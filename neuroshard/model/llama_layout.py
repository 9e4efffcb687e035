"""The Hugging Face layout of a stage's weights; with these weights their Llama, Qwen3 or OLMo 2 gives our logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from neuroshard.model.model_class import class_of
from neuroshard.model.subspace import is_factor, matrix_of
from neuroshard.model.transformer import StageModel, present
from neuroshard.types import Architecture, JsonValue

_PAD, _BEGIN, _END, _FIRST_BYTE = 0, 1, 2, 10  # ids of the tokenizer, which this room does not import


@dataclass(frozen=True)
class LlamaPart:
    """Some rows of one of our matrices under their name in that layout; the parts are consecutive in memory."""

    name: str
    start: int
    stop: int


def llama_parts(name: str, rows: int, architecture: Architecture) -> tuple[LlamaPart, ...]:
    """The parts of one of our parameters with this number of rows (its first dimension), in row order.

    Rotary pairs are already in the half-split order of that layout, so nothing is permuted.
    """
    prefix, _, kind = name.removesuffix(".weight").rpartition(".")
    if kind not in _CUT:
        return (LlamaPart(_llama_name(name, architecture), 0, rows),)
    block, place, names = {
        "query_key_value": (".attention", "self_attn", ("q_proj", "k_proj", "v_proj")),
        "gate_up": (".feed_forward", "mlp", ("gate_proj", "up_proj")),
    }[kind]
    layer = f"model.{prefix.removesuffix(block)}.{place}"
    return _cut([f"{layer}.{part}.weight" for part in names], kind, rows, architecture)


_CUT = ("query_key_value", "gate_up")  # our matrices that other programs have in parts


def _cut(names: Sequence[str], kind: str, rows: int, architecture: Architecture) -> tuple[LlamaPart, ...]:
    """The rows of each part of a matrix, under these names."""
    if kind == "query_key_value":
        queries = architecture.head_count * architecture.head_size
        edges = (0, queries, queries + architecture.key_value_head_count * architecture.head_size, rows)
    else:
        edges = (0, architecture.feed_forward_size, rows)
    return tuple(LlamaPart(name, *edge) for name, edge in zip(names, pairwise(edges), strict=True))


def titan_parts(name: str, rows: int, architecture: Architecture) -> tuple[LlamaPart, ...]:
    """The parts of one of our parameters under the names of TorchTitan's Llama, in row order.

    The rows of those with ROTATED names change places: TorchTitan rotates neighbouring pairs.
    """
    prefix, _, kind = name.removesuffix(".weight").rpartition(".")
    if kind not in _CUT:
        return (LlamaPart(_titan_name(name), 0, rows),)
    names = {"query_key_value": [f"{_FUSED}w{part}" for part in "qkv"], "gate_up": ["w1", "w3"]}[kind]
    return _cut([f"{prefix}.{part}.weight" for part in names], kind, rows, architecture)


_FUSED, _HEAD = "qkv_linear.", "lm_head.weight"  # TorchTitan 0.2 had no such prefix, and "output.weight"


def earlier_titan_names(names: Iterable[str]) -> dict[str, str]:
    """TorchTitan's names of version 0.3 -> those of 0.2, where they differ."""
    earlier = {name: "output.weight" if name == _HEAD else name.replace(f".{_FUSED}", ".") for name in names}
    return {name: before for name, before in earlier.items() if name != before}


ROTATED = ("wq.weight", "wk.weight", "q_norm.weight", "k_norm.weight")
"""The ends of TorchTitan's names whose first dimension is in the order of the rotary pairs."""


def titan_config(architecture: Architecture) -> dict[str, JsonValue]:
    """The arguments of TorchTitan's model, and the options that its Llama does not have."""
    return {
        "dim": architecture.hidden_size,
        "n_layers": architecture.layer_count,
        "n_heads": architecture.head_count,
        "n_kv_heads": architecture.key_value_head_count,
        "vocab_size": architecture.vocabulary_size,
        "hidden_dim": architecture.feed_forward_size,
        "norm_eps": architecture.norm_epsilon,
        "rope_theta": architecture.rope_theta,
        "rope_scaling_args": {"scaling_factor": 1.0},  # the default of TorchTitan 0.2 is 8
        "max_seq_len": architecture.sequence_length,
        "qk_norm": architecture.qk_norm,
        "norm_reorder": architecture.norm_reorder,
    }


def _titan_name(name: str) -> str:
    match name:
        case "embedding.weight":
            return "tok_embeddings.weight"
        case "head.weight":
            return _HEAD
        case _:
            renamed = name.replace(".feed_forward_norm.", ".ffn_norm.")
            renamed = renamed.replace(".attention.norms.query.", ".attention.q_norm.")
            renamed = renamed.replace(".attention.norms.key.", ".attention.k_norm.")
            renamed = renamed.replace(".attention.output.", ".attention.wo.")
            return renamed.replace(".feed_forward.down.", ".feed_forward.w2.")


def to_llama_state_dict(model: StageModel) -> dict[str, Tensor]:
    """Weights under Llama's names: detached views of the model's own memory. A stage returns its own part.

    Matrices with factors are computed. Raises ValueError for such a model without its subspace.
    """
    exported: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        weight, whole = parameter.detach(), name
        if is_factor(name):
            whole, _ = matrix_of(name, weight.shape, model.architecture.hidden_size)
            weight = torch.cat(list(present(model.subspace).rows_of_matrix(name, weight.cpu())))
        for part in llama_parts(whole, len(weight), model.architecture):
            exported[part.name] = weight[part.start : part.stop]
    return exported


def unit_scales(architecture: Architecture) -> dict[str, int]:
    """Names and sizes of the scales that the class needs and that our model with frozen norms does not have: ones."""
    return {_llama_name(name, architecture): size for name, size in _frozen_scales(architecture).items()}


def titan_unit_scales(architecture: Architecture) -> dict[str, int]:
    """The scales of `unit_scales` under the names of TorchTitan's Llama."""
    return {_titan_name(name): size for name, size in _frozen_scales(architecture).items()}


def _frozen_scales(architecture: Architecture) -> dict[str, int]:
    if architecture.trainable_rmsnorm:
        return {}
    whole = architecture.qk_norm == "width"
    sizes = {"attention_norm": architecture.hidden_size, "feed_forward_norm": architecture.hidden_size}
    if architecture.qk_norm != "none":
        sizes["attention.norms.query"] = architecture.head_size * (architecture.head_count if whole else 1)
        sizes["attention.norms.key"] = architecture.head_size * (architecture.key_value_head_count if whole else 1)
    return {
        f"layers.{layer}.{name}.weight": size
        for layer in range(architecture.layer_count)
        for name, size in sizes.items()
    }


def llama_config(architecture: Architecture) -> dict[str, JsonValue]:
    """The config.json that goes with the exported weights. Raises ValueError if no class computes the model."""
    known = class_of(architecture)
    return {
        "architectures": [known.name],
        "model_type": known.model_type,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.layer_count,
        "num_attention_heads": architecture.head_count,
        "num_key_value_heads": architecture.key_value_head_count,
        "head_dim": architecture.head_size,
        "intermediate_size": architecture.feed_forward_size,
        "vocab_size": architecture.vocabulary_size,
        "max_position_embeddings": architecture.sequence_length,
        "rope_theta": architecture.rope_theta,
        "rms_norm_eps": architecture.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": _PAD,
        "bos_token_id": _BEGIN,
        "eos_token_id": _END,
        "torch_dtype": "float32",
    }


def generation_config(architecture: Architecture, ids_in_use: int) -> dict[str, JsonValue]:
    """The generation_config.json: other programs then sample as a node does, without special (except EOS) and unused
    ids.
    """
    never = [i for i in range(_FIRST_BYTE) if i != _END]
    return {
        "pad_token_id": _PAD,
        "bos_token_id": _BEGIN,
        "eos_token_id": _END,
        "suppress_tokens": [*never, *range(ids_in_use, architecture.vocabulary_size)],
    }


def _llama_name(name: str, architecture: Architecture) -> str:
    after = architecture.norm_reorder  # OLMo 2 has norms after attention and feed-forward only
    match name:
        case "embedding.weight":
            return "model.embed_tokens.weight"
        case "head.weight":
            return "lm_head.weight"
        case _:
            renamed = name.replace("attention_norm", "post_attention_layernorm" if after else "input_layernorm")
            second = "post_feedforward_layernorm" if after else "post_attention_layernorm"
            renamed = renamed.replace("feed_forward_norm", second)
            renamed = renamed.replace(".attention.norms.query.", ".self_attn.q_norm.")
            renamed = renamed.replace(".attention.norms.key.", ".self_attn.k_norm.")
            renamed = renamed.replace(".attention.output.", ".self_attn.o_proj.")
            return "model." + renamed.replace(".feed_forward.down.", ".mlp.down_proj.")
