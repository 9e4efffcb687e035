"""Keys and values of past tokens, so that generating one token costs one token; the transformer writes, nobody else."""

from __future__ import annotations

import torch
from torch import Tensor

from neuroshard.types import Architecture, LayerRange


class KeyValueCache:
    """Rotated keys and values of the last `capacity` tokens for each layer of one stage.

    Positions never restart: a token keeps the RoPE angle of its place in the text, so the cached result equals the
    uncached one. Past `capacity` tokens the oldest is overwritten (a ring), which is attention with a sliding window of
    `capacity`; relative distances then stay below `sequence_length`, the range the model was trained on.
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
        self.position = 0  # tokens seen so far: the position of the next one
        shape = (batch, architecture.key_value_head_count, self.capacity, architecture.head_size)
        self._keys = {i: torch.zeros(shape, dtype=dtype, device=device) for i in range(layers.start, layers.stop)}
        self._values = {i: torch.zeros(shape, dtype=dtype, device=device) for i in range(layers.start, layers.stop)}

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store the keys and values (b, kv heads, t, head size) of the next t tokens of one layer.

        Returns the keys and values to attend to and a boolean mask (t, keys), or None when everything is visible.
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
        """Count t tokens as seen; called once, after every layer stored them."""
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
