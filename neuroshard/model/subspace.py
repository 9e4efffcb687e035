"""The subspace of a run's activations on a device: its basis U, and the frozen row F(t) of each token from a counter.

Before the free blocks, the residual stream of token t is h = F(t) + U c. U (d, k) and F (vocabulary, d) are never
trained and follow from the seed of the weights, so no message and no checkpoint contains them. Between two stages only
the k coefficients c and the token ids travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuroshard.config.run_parameters import SUBSPACE_CACHE_MB, RunParameters
from neuroshard.errors import NetworkRefusedError
from neuroshard.model.memory_limit import MEGABYTE
from neuroshard.model.subspace_basis import (
    AT_ONCE,
    HALF,
    SCALE,
    Key,
    basis_sha256,
    philox,
    subspace_basis,
    subspace_key,
)
from neuroshard.types import Architecture


def frozen_rows(ids: Tensor, width: int, key: Key) -> Tensor:
    """F (n, width) fp32 of token ids (n,) int64: uniform with deviation 1, the same bytes on every device.

    Column j of token i is word j % 4 of the counter (j // 4, i, 0, 0).
    """
    groups = -(-width // 4)
    values = torch.empty(len(ids), width, device=ids.device)
    columns = torch.arange(groups, device=ids.device)
    at_once = max(1, AT_ONCE // groups)
    for start in range(0, len(ids), at_once):
        tokens = ids[start : start + at_once, None].expand(-1, groups)
        zeros = torch.zeros_like(tokens)
        words = torch.stack(philox((columns.expand_as(tokens), tokens, zeros, zeros), key), -1)
        values[start : start + at_once] = ((words.flatten(1)[:, :width] >> 8) - HALF).to(torch.float32) * SCALE
    return values


class Subspace(nn.Module):
    """U and F of a run on the device of its model. It has no parameters, and no tensor that a checkpoint saves."""

    basis: Tensor

    def __init__(self, architecture: Architecture, seed: int, cache_mb: int = SUBSPACE_CACHE_MB) -> None:
        """`seed` is that of the initial weights; up to `cache_mb` (1 MB = 10^6 bytes) of rows stay in memory."""
        super().__init__()
        self._width, self._key = architecture.hidden_size, subspace_key(seed)
        basis = torch.from_numpy(subspace_basis(self._width, architecture.subspace_rank, seed))  # pyright: ignore[reportUnknownMemberType]
        self.register_buffer("basis", basis, persistent=False)
        self.row_limit = min(architecture.vocabulary_size, cache_mb * MEGABYTE // (4 * self._width))
        self._places = torch.full((architecture.vocabulary_size,), -1, device="cpu")  # of each id in the table, or -1
        self._table: Tensor | None = None  # (rows, d)
        self.cached_rows = 0

    def frozen_rows(self, ids: Tensor) -> Tensor:
        """F (b, t, d) fp32 of token ids (b, t) int64, on the device of U.

        The table fills up with the ids in the order in which they come and then stays as it is: frequent ids come
        early. Only for the thread that owns the model.
        """
        device, used = self.basis.device, ids.detach().cpu()
        if self._table is None or self._table.device != device:
            self._table, self.cached_rows = torch.empty(self.row_limit, self._width, device=device), 0
            self._places.fill_(-1)
        places = self._places[used]
        missing = cast("Tensor", used[places < 0].unique())  # pyright: ignore[reportUnknownMemberType]
        if not len(missing):
            return self._table[places.to(device)]
        fresh = frozen_rows(missing.to(device), self._width, self._key)
        kept = missing[: self.row_limit - self.cached_rows]
        self._table[self.cached_rows : self.cached_rows + len(kept)] = fresh[: len(kept)]
        self._places[kept] = torch.arange(self.cached_rows, self.cached_rows + len(kept))
        self.cached_rows += len(kept)
        if len(kept) == len(missing):
            return self._table[self._places[used].to(device)]
        found = self._table[places.clamp_min(0).to(device)]
        found[(places < 0).to(device)] = fresh[torch.searchsorted(missing, used[places < 0]).to(device)]
        return found

    def lift(self, coefficients: Tensor) -> Tensor:
        """U c (..., d) of coefficients (..., k), in fp32: in bf16 it would leave the span of U by 0.2 %."""
        with torch.autocast(self.basis.device.type, enabled=False):
            return functional.linear(coefficients.float(), self.basis)

    def compress(self, activations: Tensor, ids: Tensor) -> Tensor:
        """Coefficients c = U^T (h - F(t)) (b, t, k) fp32 of activations h (b, t, d) of these tokens (b, t)."""
        with torch.autocast(self.basis.device.type, enabled=False):
            return functional.linear(activations.float() - self.frozen_rows(ids), self.basis.t())

    def restore(self, coefficients: Tensor, ids: Tensor) -> Tensor:
        """Activations h = U c + F(t) (b, t, d) fp32 of coefficients (b, t, k) of these tokens (b, t)."""
        return self.lift(coefficients) + self.frozen_rows(ids)

    def rows_of_matrix(self, name: str, factor: Tensor) -> Iterator[Tensor]:
        """The rows, some at a time, of the matrix with this factor on the CPU: W = U Z, or the embedding F + C U^T."""
        basis = self.basis.cpu()
        at_once = max(1, _PRODUCT // max(self._width, factor.shape[1]))
        for start in range(0, factor.shape[0] if name == EMBEDDING else self._width, at_once):
            if name != EMBEDDING:
                yield basis[start : start + at_once] @ factor
                continue
            part = factor[start : start + at_once]
            ids = torch.arange(start, start + len(part), device="cpu")
            yield functional.linear(part, basis) + frozen_rows(ids, self._width, self._key)


_PRODUCT = 1 << 20  # numbers of a matrix that are computed at once
_FACTOR = ".factor"
EMBEDDING = "embedding.factor"


def is_factor(name: str) -> bool:
    """Whether a parameter is the trained factor of a matrix."""
    return name.endswith(_FACTOR)


def matrix_of(name: str, shape: tuple[int, ...], width: int) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the matrix with this parameter as its factor; other parameters are themselves."""
    if not is_factor(name):
        return name, shape
    whole = (shape[0], width) if name == EMBEDDING else (width, shape[1])
    return name.removesuffix(_FACTOR) + ".weight", whole


def subspace_of(parameters: RunParameters) -> Subspace | None:
    """The subspace of a run on the CPU, or None if it has none.

    Raises NetworkRefusedError if this computer computes other bytes than the run's owner has signed.
    """
    if parameters.architecture.subspace_rank == 0:
        return None
    subspace = Subspace(parameters.architecture, parameters.initial_weights_seed, parameters.subspace_cache_mb)
    found = basis_sha256(subspace.basis.numpy())
    if found != parameters.subspace_sha256:
        raise NetworkRefusedError(
            f"This computer computes another basis of the run's subspace (SHA-256 {found[:16]}, the run has "
            f"{parameters.subspace_sha256[:16] or 'none'}), so it cannot train with the others.",
            "Update NeuroShard. If that does not help, report the program's version and this computer's processor.",
        )
    return subspace
