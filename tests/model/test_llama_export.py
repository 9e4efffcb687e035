"""The exported weights in an independent model of the Hugging Face Llama layout give our logits."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from neuroshard.model.architecture import StagePlan, architecture_for
from neuroshard.model.llama_layout import llama_config, to_llama_state_dict
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.types import Architecture

ARCHITECTURES = [architecture_for(3, 97, 20), architecture_for(4, 97, 20), architecture_for(5, 97, 20)]


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def reference_logits(weights: dict[str, Tensor], a: Architecture, tokens: Tensor) -> Tensor:
    """Llama as modeling_llama.py writes it: separate projections, repeated key/value heads, explicit softmax."""
    batch, time = tokens.shape
    inverse = 1.0 / (a.rope_theta ** (torch.arange(0, a.head_size, 2).float() / a.head_size))
    angles = torch.arange(time).float()[:, None] * inverse[None]
    cosine, sine = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    hidden = weights["model.embed_tokens.weight"][tokens]
    causal = torch.full((time, time), float("-inf")).triu(1)
    for i in range(a.layer_count):
        own = {
            k.removeprefix(f"model.layers.{i}."): w for k, w in weights.items() if k.startswith(f"model.layers.{i}.")
        }
        x = norm(hidden, own["input_layernorm.weight"], a.norm_epsilon)
        q, k, v = (
            (x @ own[f"self_attn.{n}_proj.weight"].t()).view(batch, time, -1, a.head_size).transpose(1, 2)
            for n in "qkv"
        )
        q, k = q * cosine + rotate_half(q) * sine, k * cosine + rotate_half(k) * sine
        groups = a.head_count // a.key_value_head_count
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        attention = torch.softmax(q @ k.transpose(2, 3) / a.head_size**0.5 + causal, -1) @ v
        hidden = hidden + attention.transpose(1, 2).flatten(2) @ own["self_attn.o_proj.weight"].t()
        x = norm(hidden, own["post_attention_layernorm.weight"], a.norm_epsilon)
        gate, up = x @ own["mlp.gate_proj.weight"].t(), x @ own["mlp.up_proj.weight"].t()
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].t()
    return norm(hidden, weights["model.norm.weight"], a.norm_epsilon) @ weights["lm_head.weight"].t()


def make_model(architecture: Architecture) -> StageModel:
    model = StageModel(architecture)
    initialise(model, 3)
    with torch.no_grad():
        for parameter in model.parameters():  # norms away from one, so that a mixed-up norm shows
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_the_reference(architecture: Architecture) -> None:
    model = make_model(architecture)
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference_logits(to_llama_state_dict(model), architecture, tokens)
        torch.testing.assert_close(model.logits(model(tokens)), expected, atol=2e-5, rtol=1e-4)


def test_stages_export_disjoint_parts_of_the_whole() -> None:
    architecture = ARCHITECTURES[1]
    whole = to_llama_state_dict(make_model(architecture))
    names: list[str] = []
    for layers in StagePlan.even(architecture.layer_count, 3):
        names += to_llama_state_dict(StageModel(architecture, layers))
    assert sorted(names) == sorted(whole)
    assert len(names) == 9 * architecture.layer_count + 3


def test_the_config_names_the_shape() -> None:
    config = json.loads(json.dumps(llama_config(ARCHITECTURES[2])))
    assert config["model_type"] == "llama"
    assert config["num_key_value_heads"] == 2
    assert config["tie_word_embeddings"] is False
