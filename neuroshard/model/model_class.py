"""The class of Hugging Face's transformers that computes a model with these options, and why there may be none.

It does not load PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuroshard.types import Architecture


@dataclass(frozen=True)
class ModelClass:
    """A class of transformers, and its name in config.json and in GGUF."""

    name: str
    model_type: str


# By the place of the norms of queries and keys, and by whether norms come after attention and feed-forward.
CLASSES: Mapping[tuple[str, bool], ModelClass] = {
    ("none", False): ModelClass("LlamaForCausalLM", "llama"),
    ("head", False): ModelClass("Qwen3ForCausalLM", "qwen3"),
    ("width", True): ModelClass("Olmo2ForCausalLM", "olmo2"),
}


def class_of(architecture: Architecture) -> ModelClass:
    """The class that gives a model's logits. Raises ValueError with the reason if there is none."""
    objection = export_objection(architecture)
    if objection is not None:
        raise ValueError(objection)
    return CLASSES[architecture.qk_norm, architecture.norm_reorder]


def export_objection(architecture: Architecture) -> str | None:
    """The reason why no ready class computes the model, or None."""
    if (architecture.qk_norm, architecture.norm_reorder) in CLASSES:
        return None
    norms = {"none": "no norms of queries and keys", "head": "norms per head", "width": "norms over the width"}
    place = "reordered norms" if architecture.norm_reorder else "norms before attention and feed-forward"
    return (
        f"No class of transformers and no model of llama.cpp has {place} with {norms[architecture.qk_norm]} "
        f'(norm_reorder = {str(architecture.norm_reorder).lower()}, qk_norm = "{architecture.qk_norm}"), so the '
        "formats hf and gguf cannot contain this model; the formats torch and dcp can."
    )
