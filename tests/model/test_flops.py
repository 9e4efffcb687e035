"""The count of floating-point operations equals what PyTorch counts in the passes of a real stage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from neuroshard.model.architecture import StagePlan, flops_per_token
from neuroshard.model.subspace import Subspace
from neuroshard.model.transformer import StageModel
from neuroshard.types import Architecture, LayerRange

SUBSPACE = Architecture(128, 5, 4, 2, 352, 300, 32, subspace_rank=16, free_blocks=1)
SHAPES = {
    "dense": (Architecture(256, 4, 4, 4, 704, 1_000, 128), None),
    "grouped heads": (Architecture(256, 4, 8, 2, 704, 1_000, 128), None),
    "wide vocabulary": (Architecture(128, 2, 2, 1, 320, 50_000, 64), None),
    "long sequence": (Architecture(64, 2, 2, 2, 160, 500, 1_024), None),
    "norms and repeated heads": (Architecture(192, 3, 3, 1, 512, 900, 64, qk_norm="head", norm_reorder=True), None),
    "first stage": (Architecture(256, 6, 4, 2, 704, 2_000, 128), LayerRange(0, 2)),
    "middle stage": (Architecture(256, 6, 4, 2, 704, 2_000, 128), LayerRange(2, 4)),
    "last stage": (Architecture(256, 6, 4, 2, 704, 2_000, 128), LayerRange(4, 6)),
    "subspace": (SUBSPACE, None),
    "first stage of a subspace": (SUBSPACE, LayerRange(0, 2)),
    "middle stage of a subspace": (SUBSPACE, LayerRange(2, 4)),
    "last stage of a subspace": (SUBSPACE, LayerRange(3, 5)),
}


def product_in_place(_sum: tuple[int, int], left: tuple[int, int], right: tuple[int, int], **_others: object) -> int:
    """Operations of `sum.addmm_(left, right)`, which the loss uses and the counter does not know; by its shapes."""
    return 2 * left[0] * left[1] * right[1]


def counted_flops(architecture: Architecture, layers: LayerRange | None, sequences: int = 2) -> int:
    """Operations that PyTorch counts in one forward and backward pass, with attention as two matrix products."""
    subspace = Subspace(architecture, seed=1) if architecture.subspace_rank else None
    model = StageModel(architecture, layers, subspace)
    ids = torch.zeros((sequences, architecture.sequence_length), dtype=torch.int64)
    inputs = ids if model.is_first else torch.zeros((*ids.shape, architecture.wire_size), requires_grad=True)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product_in_place})
    with sdpa_kernel(SDPBackend.MATH), counter:
        output = model(inputs, ids=ids)
        loss = model.loss_sum(output, ids) if model.is_last else output.sum()
        torch.autograd.backward(loss)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", SHAPES)
def test_the_count_is_that_of_pytorch(name: str) -> None:
    architecture, layers = SHAPES[name]
    tokens = 2 * architecture.sequence_length
    assert flops_per_token(architecture, layers) * tokens == counted_flops(architecture, layers)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
def test_stages_add_up_to_the_model_and_what_crosses_their_cuts(sizes: list[int], has_subspace: bool) -> None:
    rank = 8 if has_subspace else 0
    architecture = Architecture(64, sum(sizes), 4, 2, 160, 500, 32, subspace_rank=rank, free_blocks=int(has_subspace))
    stages = sum(flops_per_token(architecture, layers) for layers in StagePlan.of_sizes(sizes))
    crossing = 2 * 4 * rank * 64  # each cut compresses and restores, forward and backward
    assert stages == flops_per_token(architecture) + (len(sizes) - 1) * crossing
