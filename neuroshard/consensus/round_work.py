"""The computation of a certified round: statistics, verdict and encoded aggregate from encoded slices. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from neuroshard.aggregation import (
    AggregatorConfig,
    GateVerdict,
    MalformedStatisticsError,
    SliceRows,
    TooFewContributionsError,
    aggregator_config,
    judge_statistics,
    needs_gram,
    read_statistics,
    reduce_slice,
    reduction_by,
    slice_statistics,
    statistics_bytes,
    sum_statistics,
)
from neuroshard.compression import EXCERPT, Codec, MalformedVectorError, SparseCodec, is_sparse, make_codec
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.effects import CompareBlocks, CompareNorms, Computation, Judge, Judged, MakeStatistics, Reduce
from neuroshard.consensus.slices import Block, Encoded, SlicePlan


@dataclass(frozen=True)
class RoundWork:
    """The computations of a round with this codec and aggregator."""

    plan: SlicePlan
    codec: Codec
    aggregator: AggregatorConfig
    outer_step: int = 0  # which the round completes
    judges_direction: bool = True  # whether the direction of contributions is checked before they are accepted

    @classmethod
    def of(cls, parameters: OuterOptimization, length: int, *, outer_step: int = 0) -> RoundWork:
        """The work for contributions of this length."""
        return cls(
            SlicePlan(length),
            make_codec(parameters.codec),
            aggregator_config(parameters),
            outer_step,
            judges_direction=parameters.strategy != "averaging",
        )

    def encoded(self, vector: Tensor) -> tuple[Encoded, ...]:
        """The encoded slices of a contribution (d,) fp32."""
        return tuple(map(self.codec.encode, torch.split(vector, self.plan.width)))

    @property
    def results(self) -> Codec:
        """The codec of the aggregate: that of the contributions, unless they are sparse and their sum is less so."""
        return SparseCodec() if is_sparse(self.codec) else self.codec

    def decoded(self, slices: Sequence[Encoded], codec: Codec | None = None) -> Tensor:
        """The vector (d,) fp32 of all slices, by default of an aggregate. Raises MalformedVectorError."""
        codec = codec or self.results
        # NumPy allocates a vector of this size in large pages, which is much faster
        vector = torch.from_numpy(np.empty(self.plan.length, np.float32))  # pyright: ignore[reportUnknownMemberType]
        for data, part in zip(slices, torch.split(vector, self.plan.width), strict=True):
            codec.decode_range(data, 0, len(part), len(part), out=part)
        return vector

    def is_slice(self, codec: Codec, index: int, data: Encoded) -> bool:
        """Whether bytes can be the slice of this number of a contribution or an aggregate with this codec."""
        size = self.plan.size(index)
        if len(data) > codec.encoded_size(size):
            return False
        try:
            codec.check(data, size)
        except MalformedVectorError:
            return False
        return True

    @property
    def encoded_bytes(self) -> int:
        """Maximum size in bytes of a whole contribution, or of an aggregate if that is larger."""
        sizes = list(map(self.plan.size, range(self.plan.count)))
        return max(sum(map(self.codec.encoded_size, sizes)), sum(map(self.results.encoded_size, sizes)))

    def answer(self, job: Computation) -> Mapping[int, Encoded] | Judged | frozenset[int] | None:
        """Compute the answer to a job."""
        match job:
            case MakeStatistics():
                return self.statistics(job)
            case Judge():
                return self.judged(job)
            case Reduce():
                return self.reduced(job)
            case CompareBlocks():
                return self.compared(job)
            case CompareNorms():
                return self.norms_compared(job)

    def statistics(self, job: MakeStatistics) -> Mapping[int, bytes]:
        """Compute a MakeStatistics job."""
        made = partial(
            slice_statistics,
            with_gram=needs_gram(self.aggregator, job.members),
            is_sparse=is_sparse(self.codec),
            established=job.members.counted,
        )
        return {index: statistics_bytes(made(self._rows(index, parts))) for index, parts in job.rows.items()}

    def judged(self, job: Judge) -> Judged:
        """Compute a Judge job."""
        count, with_gram = len(job.members.work), needs_gram(self.aggregator, job.members)
        try:
            total = sum_statistics([read_statistics(one, count, with_gram=with_gram) for one in job.statistics])
        except MalformedStatisticsError as error:  # two reducers of a slice lie together
            return Judged(GateVerdict((), {}, (), (), robust=False), None, str(error))
        verdict = judge_statistics(total, job.members, judges_direction=self.judges_direction)
        if verdict.abort_reason is not None:
            return Judged(verdict, None, verdict.abort_reason)
        try:
            tolerated = 0 if job.members.are_friends else sum(job.members.established) // 4
            return Judged(verdict, reduction_by(self.aggregator, total, verdict, tolerated=tolerated))
        except TooFewContributionsError as error:
            return Judged(verdict, None, str(error))

    def reduced(self, job: Reduce) -> Mapping[int, Encoded]:
        """Compute a Reduce job."""
        return {
            index: self.results.encode(reduce_slice(self._rows(index, parts), job.reduction))
            for index, parts in job.rows.items()
        }

    def excerpts(self, parts: Sequence[Encoded], blocks: Sequence[Block]) -> bytes:
        """Encode blocks of an encoded contribution; its codec is not sparse."""
        size = self.plan.size
        return b"".join(self.codec.excerpt(parts[index], EXCERPT * number, size(index)) for index, number in blocks)

    def compared(self, job: CompareBlocks) -> frozenset[int] | None:
        """Compute a CompareBlocks job."""
        codec, size = self.codec, self.codec.encoded_size(EXCERPT)

        def decode(row: int, start: int, stop: int, out: Tensor) -> None:
            out.copy_(codec.decode_excerpts(job.rows[row][start // EXCERPT * size : stop // EXCERPT * size]).view(-1))

        rows = SliceRows(max(job.rows) + 1, EXCERPT * len(job.blocks), decode)
        try:
            aggregate = self.excerpts(job.aggregate, job.blocks)
            found = codec.rounded_like(aggregate, reduce_slice(rows, job.reduction).view(-1, EXCERPT))
        except (MalformedVectorError, ValueError, RuntimeError):
            return None
        pairs = zip(job.blocks, codec.decode_excerpts(aggregate), found, strict=True)
        return frozenset(index for (index, _), stated, computed in pairs if not torch.equal(stated, computed))

    def norms_compared(self, job: CompareNorms) -> frozenset[int]:
        """Compute a CompareNorms job: the norm of a row is the same, bit for bit, next to any other rows."""
        count, with_gram, differing = len(job.members.work), needs_gram(self.aggregator, job.members), set[int]()
        for index, part in job.parts.items():
            stated = read_statistics(job.statistics[index], count, with_gram=with_gram)
            own = slice_statistics(self._rows(index, (part,)))
            if (stated.finite[job.row], stated.squared_norms[job.row]) != (own.finite[0], own.squared_norms[0]):
                differing.add(index)
        return frozenset(differing)

    def _rows(self, index: int, parts: Sequence[Encoded]) -> SliceRows:
        size = self.plan.size(index)
        return SliceRows(
            len(parts),
            size,
            lambda row, start, stop, out: self.codec.decode_range(parts[row], start, stop, size, out=out),
        )
