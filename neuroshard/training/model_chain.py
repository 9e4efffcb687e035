"""The stages of a whole model one behind the other on this node, for text that it continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from neuroshard.model.key_value_cache import KeyValueCache
from neuroshard.model.transformer import StageModel
from neuroshard.types import Architecture


@dataclass(frozen=True)
class ChainCaches:
    """Keys and values of past tokens, a cache for each stage, where its weights were when it was made."""

    caches: tuple[KeyValueCache, ...]
    devices: tuple[torch.device, ...]


class ModelChain:
    """Stages in the order of their layers. Law: the logits are those of the model in one piece."""

    def __init__(self, models: Sequence[StageModel]) -> None:
        """Raises ValueError without a stage, and for stages that do not follow each other."""
        ranges = [model.layer_range for model in models]
        if not models or any(a.stop != b.start for a, b in pairwise(ranges)):
            raise ValueError(f"stages of a chain must follow each other, got {ranges}")
        self._models = tuple(models)

    @property
    def architecture(self) -> Architecture:
        """Of the whole model."""
        return self._models[0].architecture

    @property
    def is_whole(self) -> bool:
        """Whether no layer is missing."""
        return self._models[0].is_first and self._models[-1].is_last

    def caches(self) -> ChainCaches:
        """Empty ones on the devices of the stages."""
        devices = self._devices()
        stages = zip(self._models, devices, strict=True)
        return ChainCaches(
            tuple(KeyValueCache(self.architecture, model.layer_range, device=device) for model, device in stages),
            devices,
        )

    def fits(self, caches: ChainCaches) -> bool:
        """Whether the stages still are where the caches are: a pause moves them."""
        return caches.devices == self._devices()

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int], caches: ChainCaches) -> Tensor:
        """Logits (vocabulary,) of what follows these tokens, which follow those that the caches have seen."""
        activations = torch.tensor([ids])
        for model, cache, device in zip(self._models, caches.caches, caches.devices, strict=True):
            forward = cast("Callable[[Tensor, KeyValueCache], Tensor]", model)
            activations = forward(activations.to(device), cache)
        return self._models[-1].logits(activations[:, -1:])[0, 0].float()

    def _devices(self) -> tuple[torch.device, ...]:
        return tuple(next(model.parameters()).device for model in self._models)
