"""The Hugging Face layout of a stage's weights; the logits of their Llama with these weights equal ours."""

from __future__ import annotations

from torch import Tensor

from neuroshard.model.transformer import StageModel
from neuroshard.types import Architecture, JsonValue


def to_llama_state_dict(model: StageModel) -> dict[str, Tensor]:
    """Weights under Llama's names: detached views of the model's own memory; a stage gives the part that it holds.

    Rotary pairs are already in the half-split order of that layout, so nothing is permuted.
    """
    heads, key_value_heads = model.architecture.head_count, model.architecture.key_value_head_count
    rows = [count * model.architecture.head_size for count in (heads, key_value_heads, key_value_heads)]
    exported: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        match kind:
            case "query_key_value":
                layer = f"model.{prefix.removesuffix('.attention')}.self_attn"
                exported[f"{layer}.q_proj.weight"] = weight[: rows[0]]
                exported[f"{layer}.k_proj.weight"] = weight[rows[0] : rows[0] + rows[1]]
                exported[f"{layer}.v_proj.weight"] = weight[rows[0] + rows[1] :]
            case "gate_up":
                layer = f"model.{prefix.removesuffix('.feed_forward')}.mlp"
                exported[f"{layer}.gate_proj.weight"] = weight[: model.architecture.feed_forward_size]
                exported[f"{layer}.up_proj.weight"] = weight[model.architecture.feed_forward_size :]
            case _:
                exported[_llama_name(name)] = weight
    return exported


def llama_config(architecture: Architecture) -> dict[str, JsonValue]:
    """The config.json that goes with the exported weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def _llama_name(name: str) -> str:
    match name:
        case "embedding.weight":
            return "model.embed_tokens.weight"
        case "head.weight":
            return "lm_head.weight"
        case _:
            renamed = name.replace("attention_norm", "input_layernorm")
            renamed = renamed.replace("feed_forward_norm", "post_attention_layernorm")
            renamed = renamed.replace(".attention.output.", ".self_attn.o_proj.")
            return "model." + renamed.replace(".feed_forward.down.", ".mlp.down_proj.")
