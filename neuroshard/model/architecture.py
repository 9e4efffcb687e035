"""The family of architectures by depth, their sizes, and the plan that cuts layers into stages.

It does not load PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from neuroshard.config.run_parameters import RunParameters
from neuroshard.types import Architecture, LayerRange

HEAD_SIZE = 64
SMALLEST_DEPTH = 2
LARGEST_DEPTH = 128


def architecture_for(depth: int, vocabulary_size: int, sequence_length: int = 512) -> Architecture:
    """The family's member with `depth` layers; more depth never gives fewer parameters.

    Heads have size 64: depth - 1 heads up to depth 5, then the next even number; two query heads share a key/value
    head. The width is 64 x heads; the feed-forward is 8/3 of it, rounded up to 64. Raises ValueError outside 2..128.
    """
    if not SMALLEST_DEPTH <= depth <= LARGEST_DEPTH:
        raise ValueError(f"depth must be in {SMALLEST_DEPTH}..{LARGEST_DEPTH}, got {depth}")
    if vocabulary_size < 1 or sequence_length < 1:
        raise ValueError("vocabulary_size and sequence_length must be positive")
    heads = depth - 1 if depth <= 5 else 2 * (depth // 2)
    hidden = HEAD_SIZE * heads
    return Architecture(
        hidden_size=hidden,
        layer_count=depth,
        head_count=heads,
        key_value_head_count=heads // 2 if heads % 2 == 0 else 1,
        feed_forward_size=-(-hidden * 8 // (3 * 64)) * 64,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
    )


def layer_matrices_count(architecture: Architecture, layers: LayerRange) -> int:
    """Parameters of the matrices of these layers: attention and feed-forward, or factors of those that write."""
    hidden, feed_forward = architecture.hidden_size, architecture.feed_forward_size
    key_value = architecture.key_value_head_count * architecture.head_size
    reading = hidden * (hidden + 2 * key_value) + 2 * hidden * feed_forward
    constrained = _constrained(architecture, layers)
    rows = constrained * architecture.subspace_rank + (len(layers) - constrained) * hidden
    return len(layers) * reading + rows * (hidden + feed_forward)


def layer_scale_count(architecture: Architecture) -> int:
    """Scales of the norms of one layer; none if they are not trained."""
    if not architecture.trainable_rmsnorm:
        return 0
    heads = architecture.head_count + architecture.key_value_head_count
    normed_heads = {"none": 0, "head": 2, "width": heads}[architecture.qk_norm]
    return 2 * architecture.hidden_size + normed_heads * architecture.head_size


def parameter_count(architecture: Architecture, layers: LayerRange | None = None) -> int:
    """Parameters of a stage: its layers, with the embedding in the first stage and final norm and head in the last."""
    layers = LayerRange(0, architecture.layer_count) if layers is None else layers
    count = layer_matrices_count(architecture, layers) + len(layers) * layer_scale_count(architecture)
    if layers.start == 0:
        count += architecture.vocabulary_size * architecture.wire_size
    if layers.stop == architecture.layer_count:
        count += architecture.vocabulary_size * architecture.hidden_size + architecture.hidden_size
    return count


def flops_per_token(architecture: Architecture, layers: LayerRange | None = None) -> int:
    """Floating-point operations per token of a stage, forward and backward: 3 (2 P + 4 L T a).

    P counts the matrix parameters, a is the width of all heads together, and attention over T positions counts in full,
    as in PaLM (Chowdhery et al. 2022, appendix B), so that the share of a device's peak is comparable. The embedding is
    a look-up. Norms and a repeated forward pass count as zero. The basis of a subspace is a matrix without a gradient
    of its own, 2 (2 k d): twice in each constrained layer, where the stage gets coefficients, and where it sends them.
    """
    a = architecture
    layers = LayerRange(0, a.layer_count) if layers is None else layers
    is_last = layers.stop == a.layer_count
    matrices = layer_matrices_count(a, layers) + (a.vocabulary_size * a.hidden_size if is_last else 0)
    attention = 2 * len(layers) * a.sequence_length * a.head_count * a.head_size
    products = 2 * _constrained(a, layers) + 1 + (not is_last) if a.subspace_rank else 0
    return 6 * (matrices + attention) + 4 * products * a.subspace_rank * a.hidden_size


def _constrained(architecture: Architecture, layers: LayerRange) -> int:
    """Number of these layers that write into the subspace only."""
    return max(0, min(layers.stop, architecture.constrained_layers) - layers.start)


class StagePlan(tuple[LayerRange, ...]):
    """Contiguous layer ranges that cover a model once, in order."""

    __slots__ = ()

    @classmethod
    def of(cls, *stages: LayerRange) -> StagePlan:
        """The plan with these stages. Raises ValueError unless they start at 0 and follow each other without a gap."""
        if not stages or stages[0].start != 0 or any(a.stop != b.start for a, b in pairwise(stages)):
            raise ValueError(f"stages must cover the layers from 0 without gaps, got {stages}")
        return cls(stages)

    @classmethod
    def even(cls, layer_count: int, stage_count: int) -> StagePlan:
        """A plan with sizes that differ by at most one, the larger ones first.

        Raises ValueError unless 1 <= stages <= layers.
        """
        if not 1 <= stage_count <= layer_count:
            raise ValueError(f"{layer_count} layers cannot be split into {stage_count} stages")
        size, extra = divmod(layer_count, stage_count)
        return cls.of_sizes([size + 1] * extra + [size] * (stage_count - extra))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> StagePlan:
        """A plan of stages with these numbers of layers. Raises ValueError for an empty stage."""
        edges = accumulate(sizes, initial=0)
        return cls.of(*(LayerRange(start, stop) for start, stop in pairwise(edges)))


def plan_of(parameters: RunParameters) -> StagePlan:
    """The layers of each stage of a run."""
    if parameters.stage_layers:
        return StagePlan.of_sizes(parameters.stage_layers)
    return StagePlan.even(parameters.architecture.layer_count, parameters.stage_count)
