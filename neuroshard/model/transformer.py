"""A contiguous run of layers of a Llama-shaped language model; the weights come from outside.

The head is not tied to the embedding: they live in different stages, and gradients never cross a stage boundary.
Query, key and value are one matrix, gate and up are another; `llama_export` cuts them for the Hugging Face layout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuroshard.model.cross_entropy import cross_entropy_sum
from neuroshard.model.key_value_cache import KeyValueCache
from neuroshard.types import Architecture, LayerRange


class Projection(nn.Module):
    """y = x W^T without a bias; W is (outputs, inputs), zero until it is initialised or loaded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return functional.linear(x, self.weight)


class RootMeanSquareNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * w over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def rotary_angles(architecture: Architecture, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (t, head_size / 2), of RoPE at the given positions (Su et al. 2021)."""
    half = architecture.head_size // 2
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device) / half
    angles = positions.to(torch.float32)[:, None] * (architecture.rope_theta**-exponents)[None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + half}) of (b, heads, t, head size) by their angles: the half-split layout."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, architecture: Architecture, index: int) -> None:
        super().__init__()
        self._heads = architecture.head_count
        self._key_value_heads = architecture.key_value_head_count
        self._index = index
        width = (self._heads + 2 * self._key_value_heads) * architecture.head_size
        self.query_key_value = Projection(architecture.hidden_size, width)
        self.output = Projection(architecture.hidden_size, architecture.hidden_size)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        batch, time, width = x.shape
        packed = self.query_key_value(x).view(batch, time, self._heads + 2 * self._key_value_heads, -1).transpose(1, 2)
        rotated = rotate(packed[:, : self._heads + self._key_value_heads], cosine, sine)
        query, key = rotated[:, : self._heads], rotated[:, self._heads :]
        value = packed[:, self._heads + self._key_value_heads :]
        mask = None
        if cache is not None:
            key, value, mask = cache.extend(self._index, key, value)
        mixed = functional.scaled_dot_product_attention(
            query,
            key.to(query.dtype),
            value.to(query.dtype),
            attn_mask=mask,
            is_causal=cache is None,
            enable_gqa=self._heads != self._key_value_heads,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, time, width))


class FeedForward(nn.Module):
    """SwiGLU: W_down (silu(W_gate x) * W_up x) (Shazeer 2020)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.gate_up = Projection(architecture.hidden_size, 2 * architecture.feed_forward_size)
        self.down = Projection(architecture.feed_forward_size, architecture.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """One layer: pre-norm attention and pre-norm feed-forward, each added to the residual stream."""

    def __init__(self, architecture: Architecture, index: int) -> None:
        super().__init__()
        self.attention_norm = RootMeanSquareNorm(architecture.hidden_size, architecture.norm_epsilon)
        self.attention = Attention(architecture, index)
        self.feed_forward_norm = RootMeanSquareNorm(architecture.hidden_size, architecture.norm_epsilon)
        self.feed_forward = FeedForward(architecture)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        x = x + self.attention(self.attention_norm(x), cosine, sine, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class StageModel(nn.Module):
    """Layers start .. stop - 1: the embedding comes with the first layer, the final norm and the head with the last.

    Law: any split into stages gives the loss and the parameter gradients of the whole model. Parameter names carry the
    layer's index in the whole model, so they do not depend on the split. Parameters are zero (norms one) until
    `initialise` or `load_vector`.
    """

    def __init__(self, architecture: Architecture, layers: LayerRange | None = None) -> None:
        super().__init__()
        whole = LayerRange(0, architecture.layer_count)
        self.architecture = architecture
        self.layer_range = whole if layers is None else layers
        if self.layer_range.stop > architecture.layer_count:
            raise ValueError(f"{self.layer_range} is not part of a model of {architecture.layer_count} layers")
        self.embedding = Projection(architecture.hidden_size, architecture.vocabulary_size) if self.is_first else None
        self.layers = nn.ModuleDict(
            {str(i): Block(architecture, i) for i in range(self.layer_range.start, self.layer_range.stop)}
        )
        norm = RootMeanSquareNorm(architecture.hidden_size, architecture.norm_epsilon)
        self.norm = norm if self.is_last else None
        self.head = Projection(architecture.hidden_size, architecture.vocabulary_size) if self.is_last else None
        cosine, sine = rotary_angles(architecture, torch.arange(architecture.sequence_length, device="cpu"))
        self.register_buffer("_cosine", cosine, persistent=False)
        self.register_buffer("_sine", sine, persistent=False)

    @property
    def is_first(self) -> bool:
        """Whether token ids come in."""
        return self.layer_range.start == 0

    @property
    def is_last(self) -> bool:
        """Whether logits and losses come out."""
        return self.layer_range.stop == self.architecture.layer_count

    def forward(self, inputs: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Token ids (b, t) for the first stage, else activations (b, t, d) -> activations (b, t, d).

        The final norm belongs to `loss_sum` and `logits`. Without a cache t is at most the sequence
        length (ValueError).
        """
        time = inputs.shape[1]
        x = functional.embedding(inputs, self.embedding.weight) if self.embedding is not None else inputs
        cosine, sine = self._angles(time, cache)
        for block in self.layers.values():
            x = block(x, cosine, sine, cache)
        if cache is not None:
            cache.advance(time)
        return x

    def loss_sum(self, activations: Tensor, labels: Tensor) -> Tensor:
        """Sum over tokens of the cross-entropy in nats, a scalar; activations (b, t, d), labels (b, t), -100 ignored.

        Can be back-propagated once. Raises ValueError on a stage without the head.
        """
        if self.norm is None or self.head is None:
            raise ValueError("only the last stage has a loss")
        hidden = self.norm(activations).flatten(0, 1)
        return cross_entropy_sum(hidden, self.head.weight, labels.flatten())

    def logits(self, activations: Tensor) -> Tensor:
        """(b, t, d) -> (b, t, vocabulary). Raises ValueError on a stage without the head."""
        if self.norm is None or self.head is None:
            raise ValueError("only the last stage has logits")
        return self.head(self.norm(activations))

    def _angles(self, time: int, cache: KeyValueCache | None) -> tuple[Tensor, Tensor]:
        first = 0 if cache is None else cache.position
        if first + time <= self.architecture.sequence_length:
            cosine, sine = self.get_buffer("_cosine"), self.get_buffer("_sine")
            return cosine[first : first + time], sine[first : first + time]
        if cache is None:
            raise ValueError(f"{time} tokens are more than the sequence length {self.architecture.sequence_length}")
        device = self.get_buffer("_cosine").device
        return rotary_angles(self.architecture, torch.arange(first, first + time, device=device))
