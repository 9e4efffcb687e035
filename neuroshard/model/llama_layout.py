"""The Hugging Face layout of a stage's weights; with these weights their Llama, Qwen3 or OLMo 2 gives our logits."""

from __future__ import annotations

from dataclasses import dataclass

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
    match kind:
        case "query_key_value":
            layer = f"model.{prefix.removesuffix('.attention')}.self_attn"
            queries = architecture.head_count * architecture.head_size
            keys = queries + architecture.key_value_head_count * architecture.head_size
            edges = (("q_proj", 0, queries), ("k_proj", queries, keys), ("v_proj", keys, rows))
        case "gate_up":
            layer = f"model.{prefix.removesuffix('.feed_forward')}.mlp"
            gates = architecture.feed_forward_size
            edges = (("gate_proj", 0, gates), ("up_proj", gates, rows))
        case _:
            return (LlamaPart(_llama_name(name, architecture), 0, rows),)
    return tuple(LlamaPart(f"{layer}.{part}.weight", start, stop) for part, start, stop in edges)


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
    if architecture.trainable_rmsnorm:
        return {}
    whole = architecture.qk_norm == "width"
    sizes = {"attention_norm": architecture.hidden_size, "feed_forward_norm": architecture.hidden_size}
    if architecture.qk_norm != "none":
        sizes["attention.norms.query"] = architecture.head_size * (architecture.head_count if whole else 1)
        sizes["attention.norms.key"] = architecture.head_size * (architecture.key_value_head_count if whole else 1)
    return {
        _llama_name(f"layers.{layer}.{name}.weight", architecture): size
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
