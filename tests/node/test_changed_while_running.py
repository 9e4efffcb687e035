"""Changes that a running node takes up at once, and the restart that its owner asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
import trio

from neuroshard.config.loading import LoadedSettings
from neuroshard.config.settings import Settings
from neuroshard.errors import ConflictError
from neuroshard.host.live_settings import Configuration
from neuroshard.node.command_loop import CommandLoop
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.node.process import StopRequest
from neuroshard.pipeline.control import RequestedPause
from neuroshard.status.board import Command, CommandChannel, CommandResult, Restart, StatusBoard, UpdateSettings
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.statuses import training_status


class Commanded:
    """The command loop and the network of a node that has no trainer yet."""

    def __init__(self, folder: Path, stop: StopRequest | None = None) -> None:
        settings = Settings(data_dir=folder, network=False, p2p_host="127.0.0.1")
        self.stop = stop or StopRequest()
        self.commands = CommandChannel()
        self.peer_network = PeerNetwork.of(settings, identity_of(1))
        self.loop = CommandLoop(
            self.commands,
            StatusBoard(training_status()),
            Configuration(LoadedSettings(settings, dict.fromkeys(Settings.model_fields, "default"))),
            self.stop,
            RequestedPause(),
            apply_settings=self.peer_network.limit_upload,
        )

    async def told(self, command: Command) -> CommandResult:
        answer = self.commands.send(command)
        await until(answer.done)
        result = answer.result()
        assert isinstance(result, CommandResult)
        return result


def commanding(one: Commanded, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.loop.run)
            await scenario()
            tasks.cancel_scope.cancel()

    trio.run(main)


def test_an_upload_limit_changes_at_once(tmp_path: Path) -> None:
    one = Commanded(tmp_path)

    async def scenario() -> None:
        for limit, bytes_per_second in ((2.5, 312_500), (20, 2_500_000), (None, None)):
            result = await one.told(UpdateSettings({"max_upload": limit}))
            assert result.message == "max_upload: in effect now."
            assert one.peer_network.upload.bytes_per_second == bytes_per_second
            assert one.peer_network.look().network.upload_limit == bytes_per_second

    commanding(one, scenario)


def test_a_restart_is_a_stop_that_starts_again(tmp_path: Path) -> None:
    one = Commanded(tmp_path)

    async def scenario() -> None:
        result = await one.told(Restart())
        assert result.state == "stopping"
        assert one.stop.starts_again

    commanding(one, scenario)


def test_a_node_that_cannot_restart_says_so_and_continues(tmp_path: Path) -> None:
    one = Commanded(tmp_path, StopRequest(may_restart=False))

    async def scenario() -> None:
        with pytest.raises(ConflictError, match="start it again"):
            await one.told(Restart())
        assert one.stop.reason is None
        assert (await one.told(UpdateSettings({"max_upload": 1}))).message

    commanding(one, scenario)
