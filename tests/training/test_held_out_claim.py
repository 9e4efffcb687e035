"""Losses that the last stage measures carry its node's signature, which the driver checks and keeps."""

from __future__ import annotations

import json
import math
from base64 import b64decode
from dataclasses import replace
from functools import partial

import pytest
import torch
import trio
from msgspec import structs
from torch import Tensor

from neuroshard.data.held_out_losses import (
    KIND,
    MAX_AGE_SECONDS,
    Evaluation,
    HeldOutLosses,
    LossSigner,
    MeasuredWith,
    claim_bytes,
    nats_per_token,
    signed_losses,
    verified_losses,
)
from neuroshard.errors import CheckpointError, DataError
from neuroshard.identity import MalformedClaimError, NodeIdentity, read_claim, sign_claim
from neuroshard.network import InMemoryNetwork, ScoreReason
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import StageGoneError
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.training.evaluator import evaluate
from neuroshard.training.record import EvaluationRecord, TrainingRecord
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.claims import identity_of
from tests.worlds.stages import ARCHITECTURE, INPUTS, LABELS, chain_of, windows

NOW = 1_700_000_000.0
RUN = RunId("1" * 64)
LAST = StageAddress(RUN, LayerRange(2, 3), 1)
WEIGHTS = MeasuredWith(RUN, LAST.layers, 7, "ab" * 32)
SUMMED = torch.tensor([16.5, 32.25])


VALIDATOR, OTHER = identity_of(1), identity_of(2)


def encoded(labels: Tensor, summed: Tensor, *, signer: NodeIdentity = VALIDATOR, now: float = NOW) -> bytes:
    return signed_losses(signer, WEIGHTS, labels, summed, now).encode()


def test_a_claim_tells_run_layers_outer_step_sequences_and_losses() -> None:
    claim = verified_losses(encoded(LABELS[:2], SUMMED), VALIDATOR.node_id, WEIGHTS, LABELS[:2], SUMMED, now=NOW)
    told = claim.payload
    assert (told.run_id, told.layers, told.outer_step, told.root) == (RUN, LayerRange(2, 3), 7, "ab" * 32)
    assert told.losses == (round(16.5 / 16, 6), round(32.25 / 16, 6))
    assert len(told.sequences) == 64


def test_losses_that_are_no_numbers_are_not_signed() -> None:
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            encoded(LABELS[:2], torch.tensor([1.0, number]))


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"{}",
        encoded(LABELS[:2], SUMMED, signer=OTHER),
        encoded(LABELS[:2], SUMMED + 0.01),
        encoded(LABELS[2:4], SUMMED),
        encoded(LABELS[:2], SUMMED, now=NOW - MAX_AGE_SECONDS - 1),
        encoded(LABELS[:2], SUMMED).replace(b"outer_step\x07", b"outer_step\x08"),
        encoded(LABELS[:2], SUMMED) + b" " * claim_bytes(2),
    ],
    ids=["nothing", "no claim", "another node's", "other losses", "other sequences", "old", "changed", "too long"],
)
def test_whatever_is_not_this_nodes_word_for_these_losses_is_refused(forged: bytes) -> None:
    with pytest.raises(DataError):
        verified_losses(forged, VALIDATOR.node_id, WEIGHTS, LABELS[:2], SUMMED, now=NOW)


@pytest.mark.parametrize("loss", [math.inf, math.nan, -1.0, 10_000.1])
def test_a_signed_loss_that_no_model_has_is_refused_by_name(loss: float) -> None:
    summed = torch.tensor([16.5, 16 * loss])
    payload = verified_losses(
        encoded(LABELS[:2], SUMMED), VALIDATOR.node_id, WEIGHTS, LABELS[:2], SUMMED, now=NOW
    ).payload
    hostile = sign_claim(VALIDATOR, KIND, structs.replace(payload, losses=nats_per_token(summed, 16)), NOW).encode()
    with pytest.raises(MalformedClaimError, match=r"at `\$\.losses\[1\]`"):
        verified_losses(hostile, VALIDATOR.node_id, WEIGHTS, LABELS[:2], summed, now=NOW)


@pytest.mark.parametrize("other", [replace(WEIGHTS, run_id=RunId("2" * 64)), replace(WEIGHTS, layers=LayerRange(1, 3))])
def test_a_claim_about_another_model_is_refused(other: MeasuredWith) -> None:
    with pytest.raises(DataError, match="other losses"):
        verified_losses(encoded(LABELS[:2], SUMMED), VALIDATOR.node_id, other, LABELS[:2], SUMMED, now=NOW)


def test_a_claim_fits_into_its_answer() -> None:
    for count in (1, 8, 64):
        labels, summed = torch.zeros(count, 512, dtype=torch.int64), torch.full((count,), 5.5432119e3)
        assert len(encoded(labels, summed)) <= claim_bytes(count)


def evaluated(compute: ComputeThread, sign: LossSigner) -> tuple[TrainingRecord, list[tuple[NodeId, ScoreReason]]]:
    """An evaluation whose last stage is on a peer that signs like this, and what was reported of that."""
    services = chain_of(compute, (0, 2, 3))
    shapes = StageShapes.for_layers(ARCHITECTURE, LAST.layers, 4)
    reports = list[tuple[NodeId, ScoreReason]]()
    record = TrainingRecord()

    def check(sender: NodeId, claim: bytes, labels: Tensor, summed: Tensor):
        return verified_losses(claim, sender, WEIGHTS, labels, summed, now=NOW)

    async def main() -> None:
        with InMemoryNetwork() as network:
            there = network.join(VALIDATOR.node_id)
            StageRequestHandler(services[1], LAST, shapes, sign=sign).serve(there)
            last = RemoteStageClient(
                network.join(NodeId("driver")),
                VALIDATOR.node_id,
                LAST,
                shapes,
                StageClientOptions(timeout_seconds=30),
                report=lambda peer, reason: reports.append((peer, reason)),
                check=check,
            )
            routing = FixedRouting([LocalStageClient(services[0]), last])
            record.evaluations.add(await evaluate(routing, windows(-1, 8), 4, step=0, now=NOW))

    trio.run(main)
    return record, [report for report in reports if report[1] is not ScoreReason.GOOD_ANSWER]


def test_an_evaluation_keeps_who_measured_it_and_what_they_signed(compute: ComputeThread) -> None:
    record, reports = evaluated(compute, encoded)
    assert reports == []
    (evaluation,) = record.evaluations.evaluations
    assert evaluation.measured_by == record.evaluations.points[-1].measured_by == (VALIDATOR.node_id,)
    signed = [read_claim(b64decode(claim), HeldOutLosses).payload.losses for claim in evaluation.claims]
    assert [loss for losses in signed for loss in losses] == list(evaluation.losses)
    assert EvaluationRecord.from_json(json.loads(json.dumps(record.evaluations.to_json()))).evaluations == (evaluation,)


@pytest.mark.parametrize(
    "sign",
    [
        lambda _labels, _summed: b"",
        lambda labels, summed: encoded(labels, summed + 1.0),
        partial(encoded, signer=OTHER),
    ],
    ids=["unsigned", "other losses", "another node"],
)
def test_losses_without_the_nodes_word_are_not_believed(compute: ComputeThread, sign: LossSigner) -> None:
    with pytest.raises(StageGoneError, match="cannot be used"):
        evaluated(compute, sign)


def test_only_the_newest_evaluation_keeps_what_was_signed() -> None:
    record = EvaluationRecord()
    for step in range(3):
        record.add(Evaluation(step, 1.0, (2.0,), (VALIDATOR.node_id,), ("claim",)))
    assert [evaluation.claims for evaluation in record.evaluations] == [(), (), ("claim",)]
    assert {evaluation.measured_by for evaluation in record.evaluations} == {(VALIDATOR.node_id,)}
    assert EvaluationRecord.from_json(record.to_json()).evaluations == record.evaluations


def test_what_this_node_measured_itself_is_written_as_before() -> None:
    assert EvaluationRecord([Evaluation(0, 1.0, (3.0, 2.0))]).to_json() == [[0, 1.0, [3.0, 2.0]]]


@pytest.mark.parametrize("rest", [[["a"]], [["a"], [1]], ["a", []], [["a"], ["b"], []], [None, None]])
def test_a_malformed_word_in_a_checkpoint_is_refused(rest: list[object]) -> None:
    with pytest.raises(CheckpointError):
        EvaluationRecord.from_json([[0, 1.0, [3.0], *rest]])  # type: ignore[list-item]


def test_losses_on_this_node_need_no_word(compute: ComputeThread) -> None:
    async def main() -> None:
        hop = LocalStageClient(chain_of(compute, (0, 3))[0])
        told = await hop.measure(INPUTS[:2], LABELS[:2])
        assert told.claim is None
        assert told.summed.shape == (2,)

    trio.run(main)
