"""Snapshots of nodes in the situations that the dashboard must explain."""

from __future__ import annotations

import time
from dataclasses import replace
from math import exp

from neuroshard.status.computer import AccelerationStatus, MemoryStatus, ResourceStatus
from neuroshard.status.data import (
    DataCoverage,
    DataStatus,
    DownloadStatus,
    RefreshState,
    RefreshStatus,
    ShardOrigin,
    ShardStatus,
    ShardUse,
)
from neuroshard.status.history import SamplesStatus, TextSample, WorkDone, WorkHistoryStatus, WorkSpan
from neuroshard.status.snapshot import (
    CheckpointGeneration,
    CheckpointStatus,
    DilocoStatus,
    HeldOutPoint,
    LearningVerdict,
    LossPoint,
    LossTrend,
    ModelStatus,
    NodeState,
    NodeStatus,
    RunStatus,
    StartupStep,
    StartupStepState,
    TrainingStatus,
    VerificationStatus,
)
from neuroshard.types import Architecture, LayerRange, NodeId, Role, RunId, ShardId, WalletId

STEPS = 764


def loss_at(step: int) -> float:
    """A plausible curve: from 8.3 towards 3.5."""
    return 3.5 + 4.8 * exp(-step / 200)


def starting() -> NodeStatus:
    """The first second of a demo."""
    now = time.time()
    stages = (
        StartupStep("Opening the data folder", StartupStepState.DONE, "Reading the lock"),
        StartupStep("Learning the vocabulary", StartupStepState.RUNNING, "2,048 of 4,096 tokens", 0.5),
        StartupStep("Building the model"),
    )
    return NodeStatus(
        version="0.1.0",
        started_at=now - 1,
        time=now,
        state_reason="Learning the vocabulary.",
        startup=stages,
        is_demo=True,
        wallet_id=WalletId("9f2c41d07be3a655"),
    )


def training() -> NodeStatus:
    """A demo that has learned for some minutes."""
    now = time.time()
    held_out = tuple(
        HeldOutPoint(step, now - 700 + step, loss_at(step) + 0.1, 8.4 - loss_at(step), 0.03)
        for step in range(0, STEPS, 100)
    )
    return replace(
        starting(),
        state=NodeState.TRAINING,
        state_reason="Training alone on its own run.",
        startup=(StartupStep("Opening the data folder", StartupStepState.DONE, "Reading the lock"),),
        started_at=now - 800,
        uptime_seconds=800,
        node_id=NodeId("12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc"),
        model=ModelStatus(
            Architecture(256, 6, 8, 4, 704, 4096, 256), 5_412_352, LayerRange(0, 6), (Role.DRIVER, Role.VALIDATOR)
        ),
        memory=MemoryStatus(6500, 6568, "total minus reserve", 1140, 1012, 1098),
        run=RunStatus(RunId("4b" * 32), is_own=True, is_demo=True, explanation="It trains a run of its own."),
        training=_progress(held_out),
        verification=VerificationStatus(
            True,
            LearningVerdict.VERIFIED,
            "Held-out loss improved by 4.31 nats.",
            "Nothing to do.",
            LossTrend.IMPROVING,
        ),
        diloco=DilocoStatus(inner_step=264, inner_steps_total=500, outer_steps=1, last_sync=now - 200),
        data=_data(),
        checkpoints=_checkpoints(now),
        resources=ResourceStatus("cpu", "AMD Ryzen 5 5600", 1.9, 2, 78 * 10**9, 204 * 10**6),
        acceleration=AccelerationStatus(
            "AMD Ryzen 5 5600", "fp32", 29_000_000, 1.2e11, "measured", tokens_per_second=2_263.0
        ),
        history=tuple(
            LossPoint(step, now - 700 + step, loss_at(step), 1e-3, step * 2048) for step in range(1, STEPS + 1)
        ),
    )


def with_a_past() -> NodeStatus:
    """A node that has trained for weeks: its contribution and what its model wrote."""
    now = time.time()
    return replace(training(), contribution=_contribution(now), samples=_samples(now))


def _contribution(now: float) -> WorkHistoryStatus:
    def span(width: float, stretches: int) -> WorkSpan:
        starts = [now // width * width - width * ago for ago in range(stretches)][::-1]
        works = [
            WorkDone(start, 2_000 * int(width), int(width), 10**6, 2 * 10**6, width * 0.9, 6 - 3 * at / stretches)
            for at, start in enumerate(starts)
            if at % 24 < 16  # it rests at night
        ]
        return WorkSpan(width, tuple(works))

    total = WorkDone(now - 30 * 86_400, 3_456_000_000, 1_728_000, 5 * 10**9, 9 * 10**9, 1_728_000.0, 3.1)
    return WorkHistoryStatus(total, span(300.0, 288), span(3_600.0, 168), span(76_800.0, 34))


def _samples(now: float) -> SamplesStatus:
    prompts = ("Once upon a time", "The function returns", "The capital of France is")
    written = {
        0: ("qzt;of}} ungle", " 3 x=ed of of", "()))"),
        10: (" the the the, the", " the the the", " the the"),
        50: (" of the of the of", " the the value", " the name the"),
        100: (" of the list of the list of", " the value of the value", " the name of the name"),
        500: (" a file is returned, and the", " a list of strings, or None", " not a string"),
        764: (", the object is created and the", " a new list with all the names", " the default is used"),
    }
    samples = tuple(
        TextSample(step, step + (step > 0), now - 800 + step, 0.4, texts) for step, texts in written.items()
    )
    return SamplesStatus(prompts, samples, 1_000)


def waiting_for_data() -> NodeStatus:
    """The CDN does not answer."""
    download = DownloadStatus("manifest.json", 0, None, 0.0, 4, "connection refused", time.time() + 30)
    data = DataStatus("https://cdn.example", verified=True, explanation="", downloads=(download,))
    return replace(
        starting(),
        state=NodeState.WAITING_FOR_DATA,
        state_reason="The data server does not answer.",
        startup=(),
        is_demo=False,
        data=data,
    )


def in_trouble() -> NodeStatus:
    """A full disk, and data that nobody vouches for."""
    healthy = training()
    assert healthy.data is not None
    return replace(
        healthy,
        is_demo=False,
        data=replace(healthy.data, verified=False, is_demo=False, explanation="The manifest carries no signature."),
        checkpoints=replace(healthy.checkpoints, alarm="The disk is full."),
    )


def _progress(held_out: tuple[HeldOutPoint, ...]) -> TrainingStatus:
    return TrainingStatus(
        steps=STEPS,
        tokens=STEPS * 2048,
        loss=loss_at(STEPS),
        loss_ema=loss_at(STEPS),
        lr=9.6e-4,
        tokens_per_second=2263.0,
        step_seconds=0.91,
        batch_size=4,
        sequences_per_step=8,
        held_out=held_out,
        held_out_sequences=32,
        unigram_entropy=6.62,
    )


def _data() -> DataStatus:
    return DataStatus(
        "http://127.0.0.1:43817",
        verified=True,
        explanation="Signed manifest.",
        is_demo=True,
        total_shards=16,
        total_tokens=612_000,
        held_out_shards=1,
        shard=ShardId(5),
        shard_windows_done=21,
        shard_windows_total=149,
        shards_seen=15,
        cached_shards=6,
        cached_bytes=1_900_000,
        cache_limit_bytes=2_000_000_000,
        next_shard_ready=True,
        shards=_shards(),
        refresh=RefreshStatus(
            RefreshState.CURRENT, "The source has the data of this run, and no newer data.", time.time() - 90
        ),
        coverage=DataCoverage(3, 14, (1.0, 1.0, 2.0, 3.0, 3.0, 2.0, 0.5, 0.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.0)),
    )


def _shards() -> tuple[ShardStatus, ...]:
    """One of each use; the next one came from another node."""
    here = dict.fromkeys((ShardUse.IN_USE, ShardUse.HELD_OUT), ShardOrigin.SOURCE) | {
        ShardUse.NEXT: ShardOrigin.NODE,
        ShardUse.READ: ShardOrigin.EARLIER,
    }
    return tuple(
        ShardStatus(ShardId(5 + number), use, 312_000, here[use], verified=True)
        if use in here
        else ShardStatus(ShardId(5 + number), use)
        for number, use in enumerate(ShardUse)
    )


def _checkpoints(now: float) -> CheckpointStatus:
    generation = CheckpointGeneration(750, 1, now - 14, loss_at(750), 65_100_000, "step-750")
    return CheckpointStatus(
        folder=f"/home/someone/.local/share/neuroshard/checkpoints/9f2c41d07be3a655/{'5e' * 32}/layers-0-4",
        generations=(generation,),
        last_saved_step=750,
        last_saved_time=now - 14,
        could_lose="the last 14 steps (13 seconds of work)",
        could_lose_steps=14,
        could_lose_seconds=13,
        last_write_seconds=0.4,
        last_stall_seconds=0.02,
    )
