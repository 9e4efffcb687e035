"""The memory that training needs, item by item, and the architecture and batch size that fit into a limit.

Pure arithmetic, calibrated against measured peaks. It does not load PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from neuroshard.config.run_parameters import SUBSPACE_CACHE_MB, CodecName, InnerOptimizerName, OuterOptimization
from neuroshard.errors import TooLittleMemoryError
from neuroshard.model.architecture import (
    LARGEST_DEPTH,
    SMALLEST_DEPTH,
    architecture_for,
    flops_per_token,
    layer_matrices_count,
    parameter_count,
)
from neuroshard.model.memory_limit import MEGABYTE, TIER_MB, least_limit_mb, planned_bytes
from neuroshard.types import Architecture, LayerRange

CPU_CHUNK_BYTES = 16 << 20  # of fp32 logits: close to the cache, and large enough for full matmul speed
ACCELERATOR_CHUNK_BYTES = 256 << 20  # kernels there need some thousand rows to be busy


def chunk_bytes_on(device: str) -> int:
    """Bytes of fp32 logits at once on a kind of device: "cpu", or an accelerator's name."""
    return CPU_CHUNK_BYTES if device == "cpu" else ACCELERATOR_CHUNK_BYTES


def chunk_rows(vocabulary_size: int, chunk_bytes: int) -> int:
    """Rows of logits computed at once: as many fp32 rows as fit into chunk_bytes, a multiple of 16, at least 16."""
    return max(16, chunk_bytes // (64 * vocabulary_size) * 16)


# Peak resident memory of whole nodes with dashboard, network and data, on Linux: 391 MB without training; with it,
# minus the vectors below, 339, 332 and 221 MB under limits of 500, 700 and 1,000 MB. The rest is slack.
PROCESS_BYTES = 430 * MEGABYTE
ACCELERATOR_BYTES = 700 * MEGABYTE  # context and library workspaces, measured on a CUDA device
FRAGMENTATION = 1.05  # overhead of the allocators
CACHED_TEXTS = 4  # that are generated with a stage at the same time
OPEN_SESSIONS = 2  # microbatches of a one-stage model whose ends stay in memory while they are in progress
REMEMBERED_MICROBATCHES = 24  # that a stage has accumulated and whose drivers have not closed their sessions yet
# In vectors, during a round; with top-k mostly the aggregate, which is less sparse than the contributions.
ENCODED_SHARE: Mapping[CodecName, float] = {
    "fp32": 1.0,
    "bf16": 0.5,
    "int8": 0.25,
    "int4": 0.13,
    "topk": 0.17,
}

STREAMED_MOMENTS_BYTES = 64 << 20  # on the device, of moments in the host's memory
COMPILED_KINDS = frozenset({"cuda", "xpu"})  # devices for which blocks are compiled
COMPILED_COPY = 3.5  # vectors of one block, while it is compiled: weights in two types, gradients of two forms

MOMENTS_AND_FACTORS = 2.5  # vectors: AdamW's two moments, and at most half of one for PowerSGD's Q and basis

SiteMode = Literal["replicate", "shard"]  # whether each rank of a site has all tensors of a stage, or its rows of them
GATHERED_BLOCKS, GATHERED_ENDS = 5, 3  # weights of a block and the next one, gradients, and buffers of the transfers

DeviceKind = Literal["cpu", "cuda", "mps", "xpu"]  # as PyTorch names them: AMD's GPUs are "cuda" too


@dataclass(frozen=True)
class DeviceNeed:
    """Bytes on the device that computes."""

    weights: int
    moments: int  # two of AdamW; one of Muon for each matrix of a layer
    gradients: int
    low_precision_copies: int  # bf16 weights under autocast
    activations: int  # kept for the backward pass, for the whole batch
    backward: int  # temporary gradients of the widest layer, or Muon's products for its largest matrix
    logits: int  # row chunks of the head, and its gradient's inputs
    sessions: int  # inputs and outputs of microbatches between their forward and their backward pass
    generation: int  # key/value caches of texts
    subspace: int  # its basis and the frozen rows of tokens
    runtime: int
    compilation: int = 0  # a copy of one block and its passes, once, while training runs
    gathered: int = 0  # in mode `shard`: whole weights and gradients of the blocks that compute, and of the ends

    @property
    def total(self) -> int:
        return _sum(self)


@dataclass(frozen=True)
class HostNeed:
    """Bytes of the process apart from the device's."""

    process: int  # interpreter, libraries, API, tokenizer, cached data
    anchor: int
    velocity: int
    checkpoint_staging: int  # copies of weights and moments; the outer state is written by reference
    contribution: int  # in a round: local weights and pseudo-gradient
    exchange: int  # in a round: encoded, the own contribution, the parts to reduce and the aggregate; and one decoded
    next_outer_state: int  # in a round: new anchor and velocity, before the old ones are dropped
    residual: int  # what a lossy codec, or factors of a gradient, lost of the last contribution
    answers: int = 0  # to drivers: stored for repetition, and under way
    moments: int = 0  # of AdamW, if they are not on the device

    @property
    def total(self) -> int:
        return _sum(self)


@dataclass(frozen=True)
class MemoryNeed:
    """Peak memory of training one stage. On a CPU node `host_bytes` includes everything."""

    kind: DeviceKind
    device: DeviceNeed
    host: HostNeed

    @property
    def device_bytes(self) -> int:
        """Peak on the accelerator; zero on a CPU node, where it is part of host_bytes."""
        return 0 if self.kind == "cpu" else _padded(self.device.total)

    @property
    def host_bytes(self) -> int:
        """Peak resident memory of the process, without the network's budgets."""
        vectors = self.host.total - self.host.process
        return self.host.process + _padded(vectors + (self.device.total if self.kind == "cpu" else 0))

    def fits(self, host_mb: int, device_mb: int | None = None) -> bool:
        """Whether it fits with the network into the limits (1 MB = 10^6 bytes). device_mb None: no such limit."""
        device_fits = device_mb is None or self.device_bytes <= device_mb * MEGABYTE
        return device_fits and planned_bytes(self.host_bytes, host_mb) <= host_mb * MEGABYTE


@dataclass(frozen=True)
class PipelineLoad:
    """The stages of a node in a pipeline, and the number of concurrent microbatches in each."""

    stages: tuple[LayerRange, ...]
    open_microbatches: int  # in each stage except the last one of the model, which does both passes at once
    kept_graphs: int = 0  # of those; the others compute their forward pass again


def memory_need(
    architecture: Architecture,
    layers: LayerRange | None = None,
    batch_size: int = 1,
    device: DeviceKind = "cpu",
    load: PipelineLoad | None = None,
    *,
    codec: CodecName = OuterOptimization.codec,
    averages_gradients: bool = False,
    optimizer: InnerOptimizerName = "adamw",
    subspace_cache_mb: int = SUBSPACE_CACHE_MB,
    moments_on_host: bool = False,
    compiles: bool = False,
    ranks: int = 1,
    mode: SiteMode = "replicate",
) -> MemoryNeed:
    """Peak memory of training these layers (None: all) with microbatches of batch_size sequences.

    On the `ranks` of a site, `device` is that of each rank, and the host that of rank 0.

    Without `load` one microbatch at a time passes through all of them. `codec` is that of the run's rounds, `optimizer`
    that of its inner steps. With `averages_gradients` moments and factors replace the velocity, and gradients are
    accumulated. `subspace_cache_mb` counts if the activations have a subspace. `moments_on_host` concerns AdamW on an
    accelerator. If blocks are compiled there (`compiles`), one of them exists twice meanwhile.
    """
    layers = LayerRange(0, architecture.layer_count) if layers is None else layers
    vector = 4 * parameter_count(architecture, layers)  # bytes of one fp32 number per parameter
    kept = int(MOMENTS_AND_FACTORS * vector) if averages_gradients else vector
    on_device = _device_need(architecture, layers, batch_size, device=device, vector=vector, load=load)
    if architecture.subspace_rank:
        on_device = replace(on_device, subspace=_subspace_bytes(architecture, batch_size, subspace_cache_mb))
    if optimizer == "muon":
        matrices = 4 * layer_matrices_count(architecture, layers)
        work = max(on_device.backward, _muon_bytes(architecture))
        on_device = replace(on_device, moments=on_device.moments - matrices, backward=work)
    moments = on_device.moments
    is_moved = moments_on_host and optimizer == "adamw" and device != "cpu"
    if is_moved:
        on_device = replace(on_device, moments=STREAMED_MOMENTS_BYTES)
    if compiles and device in COMPILED_KINDS and not architecture.subspace_rank:
        on_device = replace(on_device, compilation=_compilation_bytes(architecture, layers, batch_size))
    if mode == "shard":
        on_device = _divided(on_device, architecture, layers, ranks)
    return MemoryNeed(
        device,
        on_device,
        HostNeed(
            process=PROCESS_BYTES,
            anchor=vector,
            velocity=kept,
            checkpoint_staging=vector + moments,
            contribution=(4 if averages_gradients else 2) * vector,
            exchange=vector + int(4 * ENCODED_SHARE[codec] * vector),
            next_outer_state=vector + kept,
            residual=0 if codec == "fp32" and not averages_gradients else vector,
            answers=_answer_streams(architecture, device, load) * travelling_bytes(architecture, batch_size),
            moments=moments if is_moved else 0,
        ),
    )


def driving_bytes(a: Architecture, batch_size: int, stage_count: int, in_flight: int) -> int:
    """Peak memory of a driver without layers, for this number of concurrent microbatches."""
    stream = travelling_bytes(a, batch_size)
    kept = stage_count + 1  # inputs of each stage and a gradient, so that a lost stage can be replaced
    on_the_way = 3  # a request as tensors and as bytes, and its answer
    return PROCESS_BYTES + _padded(in_flight * (kept + on_the_way) * stream)


def stream_bytes(a: Architecture, batch_size: int) -> int:
    """The residual stream of one microbatch in bytes, in fp32."""
    return 4 * batch_size * a.sequence_length * a.hidden_size


def travelling_bytes(a: Architecture, batch_size: int) -> int:
    """Bytes of one microbatch between two stages, in fp32: the residual stream, or coefficients and int64 ids."""
    return batch_size * a.sequence_length * (4 * a.wire_size + (8 if a.subspace_rank else 0))


def _subspace_bytes(a: Architecture, batch_size: int, cache_mb: int) -> int:
    """The basis, the places of all ids in the cache of rows, the cache, and the rows of one microbatch."""
    cache = min(cache_mb * MEGABYTE, 4 * a.vocabulary_size * a.hidden_size)
    return 4 * a.hidden_size * a.subspace_rank + 8 * a.vocabulary_size + cache + 2 * stream_bytes(a, batch_size)


def _device_need(
    a: Architecture, layers: LayerRange, batch_size: int, *, device: DeviceKind, vector: int, load: PipelineLoad | None
) -> DeviceNeed:
    tokens = batch_size * a.sequence_length
    stream = stream_bytes(a, batch_size)
    feed_forward = a.feed_forward_size / a.hidden_size
    head = layers.stop == a.layer_count
    return DeviceNeed(
        weights=vector,
        moments=2 * vector,
        gradients=vector,
        low_precision_copies=vector // 2,
        activations=_graph_layers(a, layers, load) * _layer_activations(a, batch_size) + stream,
        backward=int(stream * (4 + 6 * feed_forward)),
        logits=_logits_bytes(a, tokens, device) + 4 * stream if head else 0,
        sessions=_session_streams(a, load) * (stream if load is None else travelling_bytes(a, batch_size)),
        generation=CACHED_TEXTS * 2 * len(layers) * a.key_value_head_count * a.head_size * a.sequence_length * 4,
        subspace=0,
        runtime=0 if device == "cpu" else ACCELERATOR_BYTES,
    )


def _layer_activations(a: Architecture, batch_size: int) -> int:
    """Bytes that one layer keeps for its backward pass."""
    feed_forward = a.feed_forward_size / a.hidden_size
    key_value = a.key_value_head_count / a.head_count
    # saved tensors of one layer in fp32, in units of the residual stream: counted on real graphs, exact to 1 %
    # The norms of queries and keys keep their inputs and outputs; without scales, the other norms
    # keep less by about as much.
    normed_heads = 1.5 * (1 + key_value) if a.qk_norm != "none" and a.trainable_rmsnorm else 0
    return int(stream_bytes(a, batch_size) * (10.5 + 2 * key_value + 4 * feed_forward + normed_heads))


def _compilation_bytes(a: Architecture, layers: LayerRange, batch_size: int) -> int:
    """A copy of a block, and the passes on it: their activations, and inputs and outputs with their gradients."""
    weights = 4 * layer_matrices_count(a, LayerRange(layers.start, layers.start + 1))
    return int(COMPILED_COPY * weights) + _layer_activations(a, batch_size) + 6 * stream_bytes(a, batch_size)


def _divided(need: DeviceNeed, a: Architecture, layers: LayerRange, ranks: int) -> DeviceNeed:
    """Need of one rank that has its rows of the tensors, and all of them only for the blocks that compute."""
    matrices = [layer_matrices_count(a, LayerRange(layer, layer + 1)) for layer in range(layers.start, layers.stop)]
    ends = parameter_count(a, layers) - sum(matrices)
    return replace(
        need,
        weights=-(-need.weights // ranks),
        moments=-(-need.moments // ranks),
        gradients=-(-need.gradients // ranks),
        gathered=4 * (GATHERED_BLOCKS * max(matrices) + GATHERED_ENDS * ends),
    )


def _muon_bytes(a: Architecture) -> int:
    """Temporary memory of Muon's step: three matrices of the largest size of one layer and three of its products."""
    largest = max(a.hidden_size, a.feed_forward_size) * a.hidden_size
    return 4 * 3 * (largest + a.hidden_size**2)


def _graph_layers(a: Architecture, layers: LayerRange, load: PipelineLoad | None) -> int:
    """Layers whose activations are in memory at once: of the current microbatch and of those that keep graphs."""
    if load is None:
        return len(layers)
    opening = [len(stage) for stage in load.stages if stage.stop < a.layer_count]
    closing = [len(stage) for stage in load.stages if stage.stop == a.layer_count]
    again = opening if load.kept_graphs < load.open_microbatches else []
    return load.kept_graphs * sum(opening) + max((*again, *closing), default=0)


def _session_streams(a: Architecture, load: PipelineLoad | None) -> int:
    return OPEN_SESSIONS * 3 if load is None else load.open_microbatches * _ends(a, load)


def _answer_streams(a: Architecture, device: DeviceKind, load: PipelineLoad | None) -> int:
    """Stored answers, and for each microbatch under way a request and an answer as bytes.

    On the CPU the answers of open microbatches are the tensors of the session.
    """
    if load is None:
        return 0
    copies = 0 if device == "cpu" else load.open_microbatches * len(load.stages)
    return REMEMBERED_MICROBATCHES * _ends(a, load) + 2 * load.open_microbatches + copies


def _ends(a: Architecture, load: PipelineLoad) -> int:
    """Activations of one microbatch between the stages of a node and other nodes, in and out."""
    return sum((stage.start > 0) + (stage.stop < a.layer_count) for stage in load.stages)


def _logits_bytes(a: Architecture, tokens: int, device: DeviceKind) -> int:
    """Chunks of logits: in fp32, in bf16, and the gradient in bf16."""
    return 8 * min(tokens, chunk_rows(a.vocabulary_size, chunk_bytes_on(device))) * a.vocabulary_size


def _padded(size: int) -> int:
    return int(FRAGMENTATION * size)


def _sum(need: DeviceNeed | HostNeed) -> int:
    return sum(int(getattr(need, item.name)) for item in fields(need))


LARGEST_BATCH = 8
LONGEST_STEP_SECONDS = 3.0

StepSeconds = Callable[[Architecture], float]


def propose_architecture(
    tier_mb: int,
    vocabulary_size: int,
    sequence_length: int = 512,
    device: DeviceKind = "cpu",
    *,
    device_tier_mb: int | None = None,
    step_seconds: StepSeconds | None = None,
    longest_step_seconds: float = LONGEST_STEP_SECONDS,
    moments_on_host: bool = False,
) -> Architecture:
    """The largest member of the family that fits with a batch of one, and whose step is estimated to be short enough.

    tier_mb limits the process, device_tier_mb an accelerator's own memory. The smallest member that fits is taken
    even if its step is long. More memory never gives a smaller model. Raises TooLittleMemoryError with the MB
    needed.
    """
    members = (architecture_for(d, vocabulary_size, sequence_length) for d in range(SMALLEST_DEPTH, LARGEST_DEPTH + 1))
    proposed: Architecture | None = None
    for member in members:
        if not memory_need(member, device=device, moments_on_host=moments_on_host).fits(tier_mb, device_tier_mb):
            break
        if proposed is not None and step_seconds is not None and step_seconds(member) > longest_step_seconds:
            break
        proposed = member
    if proposed is None:
        smallest = architecture_for(SMALLEST_DEPTH, vocabulary_size, sequence_length)
        raise _too_little(smallest, None, device, tier_mb, device_tier_mb)
    return proposed


def batch_size_for(
    architecture: Architecture,
    layers: LayerRange | None,
    tier_mb: int,
    device: DeviceKind = "cpu",
    *,
    device_tier_mb: int | None = None,
    moments_on_host: bool = False,
) -> int:
    """The largest batch in 1..8 with which these layers (None: all) fit. Raises TooLittleMemoryError if none does."""
    for batch_size in range(LARGEST_BATCH, 0, -1):
        need = memory_need(architecture, layers, batch_size, device, moments_on_host=moments_on_host)
        if need.fits(tier_mb, device_tier_mb):
            return batch_size
    raise _too_little(architecture, layers, device, tier_mb, device_tier_mb)


def estimated_step_seconds(architecture: Architecture, sequences: int, flops_per_second: float) -> float:
    """Seconds of an inner step of `sequences` sequences at a sustained rate of floating-point operations."""
    return flops_per_token(architecture) * sequences * architecture.sequence_length / flops_per_second


def _too_little(
    architecture: Architecture,
    layers: LayerRange | None,
    device: DeviceKind,
    tier_mb: int,
    device_tier_mb: int | None,
) -> TooLittleMemoryError:
    need = memory_need(architecture, layers, 1, device)
    where, wanted_mb, given = "memory", least_limit_mb(need.host_bytes), tier_mb
    if device_tier_mb is not None and need.device_bytes > device_tier_mb * MEGABYTE:
        where, wanted_mb, given = "memory on the device", -(-need.device_bytes // MEGABYTE), device_tier_mb
    wanted_tier = -(-wanted_mb // TIER_MB) * TIER_MB
    return TooLittleMemoryError(
        f"Training this model needs {wanted_tier} MB of {where}; {given} MB may be used, counted in steps of 500 MB.",
        f"Raise --memory or the container's limit to {wanted_tier} MB, or use a computer that has them.",
    )
