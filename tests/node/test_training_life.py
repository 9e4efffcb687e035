"""What a node's pause, settings and memory are like when it goes on to other stages, or to another state of its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import neuroshard.node.stage_training
from neuroshard.config.loading import LoadedSettings
from neuroshard.config.settings import Settings
from neuroshard.errors import NotReadyError
from neuroshard.host.live_settings import Configuration
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.node.command_loop import CommandLoop
from neuroshard.node.process import StopRequest
from neuroshard.node.stage import bring_up_stage
from neuroshard.node.stage_training import RunningNode
from neuroshard.node.training_life import TrainingLife
from neuroshard.status.board import Command, CommandChannel, CommandResult, Pause, Resume, Shutdown, UpdateSettings
from neuroshard.status.snapshot import NodeState
from tests.worlds.clock import until
from tests.worlds.real_nodes import RealNode, RealWorld, play


class _Watched:
    """Remembers which node it was made for, weakly."""

    def __init__(self, node: RunningNode, begun: list[weakref.ref[RunningNode]]) -> None:
        begun.append(weakref.ref(node))

    async def run(self) -> None:
        await anyio.sleep_forever()

    def publish(self) -> None:
        """Nobody looks."""


class Living:
    """A node that trains stage 0 in a TrainingLife, with commands."""

    def __init__(self, node: RealNode) -> None:
        self.node = node
        self.begun: list[weakref.ref[RunningNode]] = []
        self.stop = StopRequest()
        self.configuration = Configuration(
            LoadedSettings(node.settings, dict.fromkeys(Settings.model_fields, "default"))
        )
        self.commands = CommandChannel()
        self.loop = CommandLoop(self.commands, node.board, self.configuration, self.stop, node.requested_pause)
        self.life = TrainingLife(
            node.training, self.loop, self.stop, node.publisher, lambda one: _Watched(one, self.begun)
        )

    @property
    def present(self) -> RunningNode:
        node = self.begun[-1]()
        assert node is not None
        return node

    async def run(self) -> None:
        await self.life.run(lambda: self.node.training.begin(self.node.ground, StageRange(0, 1)), lambda _: [])

    def leave(self) -> None:
        """Make the node begin its stage anew, as when the other replicas went on without it."""
        self.present.lives[0].group.must_follow.set()

    async def told(self, command: Command) -> CommandResult:
        answer = self.commands.send(command)
        await until(answer.done)
        result = answer.result()
        assert isinstance(result, CommandResult)
        return result

    async def state(self, state: NodeState) -> None:
        await until(lambda: self.present.trainer.snapshot().state is state)


def living(
    genesis: Path, folder: Path, scenario: Callable[[Living], Awaitable[None]], prepare: Callable[[Living], None]
) -> None:
    async def whole(world: RealWorld) -> None:
        node, other = await world.node(0), await world.node(1)
        one = Living(node)
        prepare(one)
        async with anyio.create_task_group() as tasks:
            for each in (node, other):
                tasks.start_soon(each.live)
                await each.networking.up()
            tasks.start_soon(world.keep_reporting)
            tasks.start_soon(one.loop.run)
            tasks.start_soon(one.run)
            tasks.start_soon((await other.begin(1)).trainer.run)
            await until(lambda: len(one.begun) == 1)
            await scenario(one)
            one.stop.ask("the end")
            await until(lambda: one.present.trainer.snapshot().state is NodeState.NOT_TRAINING)
            tasks.cancel_scope.cancel()

    play(genesis, folder, whole)


def as_is(_: Living) -> None:
    """Nothing to prepare."""


def test_a_paused_node_follows_nobody_until_it_is_resumed(small_genesis: Path, tmp_path: Path) -> None:
    async def scenario(one: Living) -> None:
        assert (await one.told(Pause())).state == "paused"
        one.leave()
        await anyio.sleep(0.05)
        assert len(one.begun) == 1
        assert one.present.trainer.snapshot().state is NodeState.PAUSED
        await one.told(Resume())
        await until(lambda: len(one.begun) == 2)
        assert not one.present.trainer.is_pause_wanted

    living(small_genesis, tmp_path, scenario, as_is)


def test_what_was_asked_between_two_trainers_is_not_lost(
    small_genesis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = anyio.Event()
    gate.set()

    async def slowly(**parts: Any) -> object:
        await gate.wait()
        return await bring_up_stage(**parts)

    monkeypatch.setattr(neuroshard.node.stage_training, "bring_up_stage", slowly)

    async def scenario(one: Living) -> None:
        nonlocal gate
        gate = anyio.Event()
        one.leave()
        await until(lambda: one.begun[0]() is None or one.node.swarm.held is None)
        told = await one.told(Pause(3600.0))
        assert "as soon as" in told.message
        await one.told(UpdateSettings({"max_checkpoint_storage": 7}))
        gate.set()
        await until(lambda: len(one.begun) == 2)
        await one.state(NodeState.PAUSED)
        snapshot = one.present.trainer.snapshot()
        assert snapshot.reason == "Paused by the user."
        assert snapshot.paused_until is not None
        assert one.present.lives[0].keeper.store.limits.own_bytes == 7_000_000

    living(small_genesis, tmp_path, scenario, as_is)


def test_after_a_shutdown_nothing_is_begun_any_more(small_genesis: Path, tmp_path: Path) -> None:
    async def scenario(one: Living) -> None:
        stopped = one.commands.send(Shutdown("the end"))
        await until(stopped.done)
        with pytest.raises(NotReadyError):
            await one.told(UpdateSettings({"max_checkpoint_storage": 7}))

    living(small_genesis, tmp_path, scenario, as_is)


def test_a_node_started_without_training_stays_resumed(small_genesis: Path, tmp_path: Path) -> None:
    async def scenario(one: Living) -> None:
        await one.state(NodeState.PAUSED)
        await one.told(Resume())
        one.leave()
        await until(lambda: len(one.begun) == 2)
        assert not one.present.trainer.is_pause_wanted

    living(small_genesis, tmp_path, scenario, lambda one: one.node.requested_pause.begin("Started without training."))


def test_changed_settings_reach_copies_and_stay(small_genesis: Path, tmp_path: Path) -> None:
    async def scenario(one: Living) -> None:
        one.node.settings = one.node.settings.model_copy(update={"max_checkpoint_storage": 7})
        copies = one.node.training.copies
        assert copies is not None
        assert copies.settings().max_checkpoint_storage == 7
        one.leave()
        await until(lambda: len(one.begun) == 2)
        await until(lambda: one.present.lives[0].keeper.store.limits.own_bytes != 0)

    living(small_genesis, tmp_path, scenario, as_is)


def test_a_node_that_may_send_nothing_large_agrees_to_no_round(small_genesis: Path, tmp_path: Path) -> None:
    async def scenario(one: Living) -> None:
        await anyio.lowlevel.checkpoint()
        group, gate = one.present.lives[0].group, one.node.networking.gate
        assert group.replica_status().is_ready
        gate.close("The month's 50 GB are used up.")
        assert not group.replica_status().is_ready
        gate.open()
        assert group.replica_status().is_ready

    living(small_genesis, tmp_path, scenario, as_is)


def test_nothing_of_the_stages_before_is_in_memory_when_new_ones_are_built(
    small_genesis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[Any]] = []
    alive: list[int] = []

    async def watched(**parts: Any) -> object:
        if parts["index"] == 0:
            alive.append(sum(model() is not None for model in models))
        live = await bring_up_stage(**parts)
        if parts["index"] == 0:
            models.append(weakref.ref(live.service.executor.model))
        return live

    monkeypatch.setattr(neuroshard.node.stage_training, "bring_up_stage", watched)

    async def scenario(one: Living) -> None:
        for count in (2, 3):
            one.leave()
            await until(lambda count=count: len(one.begun) == count)
        assert alive == [0, 0, 0]

    gc.disable()  # what is gone is gone because the node saw to it
    try:
        living(small_genesis, tmp_path, scenario, as_is)
    finally:
        gc.enable()
