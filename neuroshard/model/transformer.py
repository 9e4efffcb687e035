"""A contiguous range of layers of a Llama-shaped language model: forward pass, loss, key/value cache, sampling.

The weights come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional

from neuroshard.model.memory_need import chunk_bytes_on, chunk_rows
from neuroshard.model.subspace import Subspace
from neuroshard.types import Architecture, LayerRange

IGNORED_LABEL = -100
SMALLEST_PROBABILITY = 2.0**-126  # of fp32 at full precision: a token's loss is reported as 87.3 nats at most


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int | None = None) -> Tensor:
    """Sum of -log softmax(hidden W^T)[label] over rows whose label is not -100.

    hidden (n, d), weight (vocabulary, d), labels (n,) int64 -> scalar fp32. The gradients are computed chunk by
    chunk in the forward pass, while the logits are in memory; the result can be back-propagated once. A token's loss
    counts as 87.3 nats at most (its gradient stays exact), so that the softmax is the only pass over the logits.
    """
    if chunk_bytes is None:
        chunk_bytes = chunk_bytes_on(hidden.device.type)
    rows = chunk_rows(weight.shape[0], chunk_bytes)
    apply = cast("Callable[..., Tensor]", _ChunkedCrossEntropy.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(hidden, weight, labels, rows)


def _loss_and_probabilities(logits: Tensor, target: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, and softmax(logits) (rows, vocabulary) fp32, which overwrites fp32 logits."""
    if logits.dtype == torch.float32:
        probabilities = torch.softmax(logits, dim=1, out=logits)
    else:
        probabilities = torch.softmax(logits, dim=1, dtype=torch.float32)
    losses = probabilities.gather(1, target).clamp_min(SMALLEST_PROBABILITY).log().neg()
    return losses.masked_fill_(~kept, 0.0).sum(), probabilities


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        # on an accelerator the check would wait for the device, and one more pass costs little there
        some_ignored = device != "cpu" or bool((labels == IGNORED_LABEL).any())
        with torch.autocast(device, enabled=False):
            low_weight = weight.to(dtype)
            buffer = hidden.new_empty((min(rows, hidden.shape[0]), weight.shape[0]), dtype=dtype)
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            for start in range(0, hidden.shape[0], rows):
                part = hidden[start : start + rows].to(dtype)
                logits = torch.mm(part, low_weight.t(), out=buffer[: part.shape[0]])
                kept = (labels[start : start + rows] != IGNORED_LABEL)[:, None]
                target = labels[start : start + rows, None].where(kept, 0)
                part_loss, gradient = _loss_and_probabilities(logits, target, kept)
                loss += part_loss
                if hidden_gradient is None and weight_gradient is None:
                    continue
                gradient.scatter_add_(1, target, gradient.new_full((1, 1), -1.0).expand_as(target))
                if some_ignored:
                    gradient.masked_fill_(~kept, 0.0)
                gradient = gradient.to(dtype)
                if hidden_gradient is not None:
                    hidden_gradient[start : start + rows] = gradient @ low_weight
                if weight_gradient is not None and weight_gradient.dtype == dtype:
                    weight_gradient.addmm_(gradient.t(), part)
                elif weight_gradient is not None:
                    weight_gradient += gradient.t() @ part
        ctx.gradients = (hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_gradient, weight_gradient = ctx.gradients
        if hidden_gradient is None and weight_gradient is None:
            raise RuntimeError("the summed cross-entropy can be back-propagated only once")
        ctx.gradients = (None, None)  # scaled in place below, so they can be used once
        scaled = [None if part is None else part.mul_(grad_outputs[0]) for part in (hidden_gradient, weight_gradient)]
        return scaled[0], scaled[1], None, None


class KeyValueCache:
    """Rotated keys and values of the last `capacity` tokens for each layer of one stage.

    Positions never restart: a token keeps the RoPE angle of its place in the text, so the cached result equals the
    uncached one. Past `capacity` tokens the oldest is overwritten (a ring), which is attention with a sliding window
    of `capacity`; relative distances then stay below `sequence_length`, the range the model was trained on.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: LayerRange,
        batch: int = 1,
        capacity: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = architecture.sequence_length if capacity is None else capacity
        if batch < 1 or not 1 <= self.capacity <= architecture.sequence_length:
            raise ValueError(
                f"a cache needs batch >= 1 and 1 <= capacity <= {architecture.sequence_length}, got {batch}, {capacity}"
            )
        self.position = 0  # number of tokens so far: the position of the next one
        shape = (batch, architecture.key_value_head_count, self.capacity, architecture.head_size)
        self._keys = {i: torch.zeros(shape, dtype=dtype, device=device) for i in range(layers.start, layers.stop)}
        self._values = {i: torch.zeros(shape, dtype=dtype, device=device) for i in range(layers.start, layers.stop)}

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store the keys and values (b, kv heads, t, head size) of the next t tokens of one layer.

        Returns the keys and values to attend to and a boolean mask (t, keys), or None if everything is visible.
        """
        count = keys.shape[2]
        if count == 1:
            self._store(layer, keys, values)
            filled = min(self.position + 1, self.capacity)
            return self._keys[layer][:, :, :filled], self._values[layer][:, :, :filled], None
        old_positions = self._stored_positions(keys.device)  # (stored,) in slot order
        all_keys = torch.cat((self._keys[layer][:, :, : len(old_positions)].to(keys.dtype), keys), dim=2)
        all_values = torch.cat((self._values[layer][:, :, : len(old_positions)].to(values.dtype), values), dim=2)
        new_positions = torch.arange(self.position, self.position + count, device=keys.device)
        distance = new_positions[:, None] - torch.cat((old_positions, new_positions))[None, :]
        self._store(layer, keys, values)
        return all_keys, all_values, (distance >= 0) & (distance < self.capacity)

    def advance(self, count: int) -> None:
        """Count t tokens; called once, after every layer stored them."""
        self.position += count

    def _store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        count = keys.shape[2]
        kept = min(count, self.capacity)
        last = self.position + count
        slots = torch.arange(last - kept, last, device=keys.device) % self.capacity
        self._keys[layer].index_copy_(2, slots, keys[:, :, count - kept :].to(self._keys[layer].dtype))
        self._values[layer].index_copy_(2, slots, values[:, :, count - kept :].to(self._values[layer].dtype))

    def _stored_positions(self, device: torch.device) -> Tensor:
        if self.position <= self.capacity:
            return torch.arange(self.position, device=device)
        slots = torch.arange(self.capacity, device=device)
        return self.position - 1 - (self.position - 1 - slots) % self.capacity


class Projection(nn.Module):
    """y = x W^T without a bias. W is (outputs, inputs), zero until it is initialised or loaded.

    With several numbers of outputs W has that many logical matrices, one below the other.
    """

    def __init__(self, inputs: int, *outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.zeros(sum(outputs), inputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return functional.linear(x, self.weight)


class Factor(nn.Module):
    """Z (rows, columns), the trained factor of a matrix that a subspace constrains; zero until it is initialised."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(rows, columns))


class FactoredProjection(Factor):
    """y = U Z x without a bias: the result stays in the subspace. Z is (k, inputs). It needs a subspace to compute."""

    def __init__(self, inputs: int, rank: int, subspace: Subspace | None) -> None:
        super().__init__(rank, inputs)
        self.outputs = (rank,)
        self.subspace = subspace

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., d)."""
        return present(self.subspace).lift(functional.linear(x, self.factor))


def writing_projection(
    inputs: int, architecture: Architecture, index: int, subspace: Subspace | None
) -> Projection | FactoredProjection:
    """The matrix with which a layer writes to the residual stream."""
    if index < architecture.constrained_layers:
        return FactoredProjection(inputs, architecture.subspace_rank, subspace)
    return Projection(inputs, architecture.hidden_size)


def present(subspace: Subspace | None) -> Subspace:
    """The subspace that a model needs to compute. Raises ValueError without it."""
    if subspace is None:
        raise ValueError("a model of this architecture computes with the subspace of its run")
    return subspace


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


def norm_of(size: int, architecture: Architecture) -> nn.RMSNorm:
    """The norm x / sqrt(mean(x^2) + epsilon), times a trained scale if the run's norms have one. Its input is fp32."""
    return nn.RMSNorm(size, architecture.norm_epsilon, architecture.trainable_rmsnorm)


class QueryKeyNorm(nn.Module):
    """Norms of queries and keys, over each head or over all heads together."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        whole = architecture.qk_norm == "width"
        sizes = (architecture.head_count, architecture.key_value_head_count) if whole else (1, 1)
        self.query, self.key = (norm_of(heads * architecture.head_size, architecture) for heads in sizes)
        self._queries = architecture.head_count
        self._whole = whole

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, query and key heads, head size) -> the same shape, fp32."""
        x = x.float()  # under autocast the matrices give bf16, in which norms would lose precision
        query, key = x[:, :, : self._queries], x[:, :, self._queries :]
        if not self._whole:
            return torch.cat((self.query(query), self.key(key)), dim=2)
        parts = (self.query(query.flatten(2)), self.key(key.flatten(2)))
        return torch.cat(parts, dim=2).view(x.shape)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, and with norms of queries and keys if the run has them."""

    def __init__(self, architecture: Architecture, index: int, subspace: Subspace | None = None) -> None:
        super().__init__()
        self._heads = architecture.head_count
        self._key_value_heads = architecture.key_value_head_count
        self._index = index
        key_value_size = self._key_value_heads * architecture.head_size
        width = architecture.hidden_size
        self.query_key_value = Projection(width, width, key_value_size, key_value_size)
        self.output = writing_projection(width, architecture, index, subspace)
        self.norms = QueryKeyNorm(architecture) if architecture.qk_norm != "none" else None

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        batch, time, width = x.shape
        turned = self._heads + self._key_value_heads  # heads of queries and keys
        packed = self.query_key_value(x).view(batch, time, turned + self._key_value_heads, -1)
        normed = packed[:, :, :turned] if self.norms is None else self.norms(packed[:, :, :turned])
        rotated = rotate(normed.transpose(1, 2), cosine, sine).to(packed.dtype)
        query, key = rotated[:, : self._heads], rotated[:, self._heads :]
        value = packed[:, :, turned:].transpose(1, 2)
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

    def __init__(self, architecture: Architecture, index: int, subspace: Subspace | None = None) -> None:
        super().__init__()
        self.gate_up = Projection(
            architecture.hidden_size, architecture.feed_forward_size, architecture.feed_forward_size
        )
        self.down = writing_projection(architecture.feed_forward_size, architecture, index, subspace)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to the residual stream.

    The norm comes before each of them (Zhang and Sennrich 2019), or reordered after it (OLMo 2).
    """

    def __init__(self, architecture: Architecture, index: int, subspace: Subspace | None = None) -> None:
        super().__init__()
        self.attention_norm = norm_of(architecture.hidden_size, architecture)
        self.attention = Attention(architecture, index, subspace)
        self.feed_forward_norm = norm_of(architecture.hidden_size, architecture)
        self.feed_forward = FeedForward(architecture, index, subspace)
        self._reordered = architecture.norm_reorder

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        if self._reordered:
            x = x + self.attention_norm(self.attention(x, cosine, sine, cache).float())
            return x + self.feed_forward_norm(self.feed_forward(x).float())
        x = x + self.attention(self.attention_norm(x), cosine, sine, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


RunBlock = Callable[[Block, Tensor, Tensor, Tensor, KeyValueCache | None], Tensor]
"""A form of `Block.__call__`: the block first, then its arguments."""


class StageModel(nn.Module):
    """Layers start .. stop - 1. The embedding belongs to the first layer, the final norm and the head to the last.

    Law: any split into stages gives the loss and the parameter gradients of the whole model. Parameter names contain
    the layer's index in the whole model, so they do not depend on the split. Parameters are zero (norms one) until
    `initialise` or `load_vector`.

    With a subspace of rank k, stages pass each other k coefficients per token and the token ids, see `Subspace`.
    """

    __call__: Callable[..., Tensor]  # that of nn.Module, which runs `forward`

    def __init__(
        self, architecture: Architecture, layers: LayerRange | None = None, subspace: Subspace | None = None
    ) -> None:
        """A model with a subspace needs that of its run to compute; without it, it only has parameters."""
        super().__init__()
        whole = LayerRange(0, architecture.layer_count)
        self.architecture = architecture
        self.layer_range = whole if layers is None else layers
        if self.layer_range.stop > architecture.layer_count:
            raise ValueError(f"{self.layer_range} is not part of a model of {architecture.layer_count} layers")
        self.is_first = self.layer_range.start == 0  # the input is token ids
        self.is_last = self.layer_range.stop == architecture.layer_count  # the stage computes logits and losses
        self.subspace = subspace
        self.embedding = _embedding(architecture) if self.is_first else None
        self.layers = nn.ModuleDict(
            {str(i): Block(architecture, i, subspace) for i in range(self.layer_range.start, self.layer_range.stop)}
        )
        norm = nn.RMSNorm(architecture.hidden_size, architecture.norm_epsilon)
        self.norm = norm if self.is_last else None
        self.head = Projection(architecture.hidden_size, architecture.vocabulary_size) if self.is_last else None
        cosine, sine = rotary_angles(architecture, torch.arange(architecture.sequence_length, device="cpu"))
        self.register_buffer("_cosine", cosine, persistent=False)
        self.register_buffer("_sine", sine, persistent=False)

    def forward(
        self,
        inputs: Tensor,
        cache: KeyValueCache | None = None,
        ids: Tensor | None = None,
        run_block: RunBlock = Block.__call__,
    ) -> Tensor:
        """Token ids (b, t) for the first stage, otherwise activations (b, t, d) -> activations (b, t, d).

        With a subspace, stages other than the first get coefficients (b, t, k) and the ids (b, t) of the tokens, and
        stages other than the last return coefficients. The final norm belongs to `loss_sum` and `logits`. Without a
        cache t is at most the sequence length (ValueError).
        """
        time = inputs.shape[1]
        x = inputs if self.embedding is None else functional.embedding(inputs, next(self.embedding.parameters()))
        if self.architecture.subspace_rank:
            ids = inputs if self.is_first else ids
            if ids is None:
                raise ValueError("coefficients need the ids of their tokens")
            x = present(self.subspace).restore(x, ids)
        cosine, sine = self._angles(time, cache)
        for block in cast("Iterable[Block]", self.layers.values()):
            x = run_block(block, x, cosine, sine, cache)
        if cache is not None:
            cache.advance(time)
        return x if self.is_last or self.subspace is None or ids is None else self.subspace.compress(x, ids)

    @property
    def first_block(self) -> Block:
        return cast("Block", next(iter(self.layers.values())))

    def loss_sum(self, activations: Tensor, labels: Tensor) -> Tensor:
        """Sum over tokens of the cross-entropy in nats, a scalar; activations (b, t, d), labels (b, t), -100 ignored.

        It can be back-propagated once. Raises ValueError on a stage without the head.
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


def _embedding(architecture: Architecture) -> Projection | Factor:
    """One row per token id: of the embedding, or of its trained factor C (vocabulary, k) in E = F + C U^T."""
    if architecture.subspace_rank:
        return Factor(architecture.vocabulary_size, architecture.subspace_rank)
    return Projection(architecture.hidden_size, architecture.vocabulary_size)


def sample_next(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw a token id from logits (vocabulary,): softmax(logits / temperature) cut to its smallest top_p nucleus.

    Temperature 0 takes the largest logit. Entries of -inf are never drawn (Holtzman et al. 2020 for the nucleus).
    Raises ValueError for a temperature below 0, top_p outside (0, 1], or logits with NaN, +inf or no finite entry.
    """
    if not (isfinite(temperature) and temperature >= 0 and 0 < top_p <= 1):
        raise ValueError(f"temperature must be >= 0 and top_p in (0, 1], got {temperature} and {top_p}")
    values = logits.detach().to("cpu", torch.float32).flatten()
    highest = float(values.max())  # NaN if any entry is
    if not isfinite(highest):
        raise ValueError("the logits are not finite, or forbid every token")
    if temperature == 0:
        return int(values.argmax())
    scaled = (values - highest) / max(temperature, 1e-6)
    probabilities, ids = torch.softmax(scaled, dim=0).sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities  # mass before each token: 0 for the first, which always stays
    nucleus = probabilities.where((before < top_p) | (before <= 0), 0)
    return int(ids[torch.multinomial(nucleus, 1, generator=generator)])
