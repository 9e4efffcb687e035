"""The further nodes of `demo --nodes N`: processes with wallets and folders of their own that end with this one."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import Process

from neuroshard.api.address import dashboard_url
from neuroshard.config.folders import this_program
from neuroshard.config.instance_lock import read_lock_owner
from neuroshard.node.demo import WALLET_FILE, demo_token
from neuroshard.types import RunId

log = logging.getLogger(__name__)

OUTPUT_FILE = "output.txt"
STOP_SECONDS = 30.0  # for a final checkpoint
LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Invitation:
    """What a further node needs to join."""

    run_id: RunId
    peer: str  # multiaddr of the first node
    genesis: str  # address of its data server
    max_stages: int | None = None  # that a node begins with
    spare_stages: int = 0  # that it holds beyond those when nobody else does
    max_storage: int | None = None  # megabytes of cached shards of each
    is_training: bool = True  # from the start


class LocalSwarm:
    """Starts the nodes 2..count in `<folder>/node-<k>` and ends them with itself."""

    def __init__(self, folder: Path, count: int, threads_each: int) -> None:
        self._folder = folder
        self._count = count
        self._threads = threads_each

    async def run(self, invitation: Invitation) -> None:
        """Start the nodes and watch them until cancelled, or until all have ended. Raises StorageError."""
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            for number in range(2, self._count + 1):
                folder = self._folder / f"node-{number}"
                demo_token(folder)
                command = node_command(folder, invitation, self._threads)
                process = await stack.enter_async_context(await started(command, folder / OUTPUT_FILE))
                tasks.start_soon(_watch, number, folder, process)


def node_command(folder: Path, invitation: Invitation, threads: int) -> list[str]:
    """The command line of a further node. Its standard input is a leash: it ends when that closes."""
    options: Mapping[str, str] = {
        "--data-dir": str(folder),
        "--token-file": str(folder / WALLET_FILE),
        "--genesis": invitation.genesis,
        "--run": invitation.run_id,
        "--peer": invitation.peer,
        "--p2p-host": "127.0.0.1",
        "--port": "0",
        "--cpu-threads": str(threads),
    }
    limits = {
        "--max-stages": invitation.max_stages,
        "--spare-stages": invitation.spare_stages,
        "--max-storage": invitation.max_storage,
    }
    options = {**options, **{name: str(limit) for name, limit in limits.items() if limit is not None}}
    flat = [part for option in options.items() for part in option]
    switches = ["--headless", "--end-with-stdin", *([] if invitation.is_training else ["--no-training"])]
    return [*this_program(), *flat, *switches]


async def started(command: list[str], output: Path) -> _Leashed:
    """Start a process whose output goes to a file; it sees nothing of NeuroShard's environment variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    with output.open("wb") as file:
        process = await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    return _Leashed(process)


class _Leashed:
    """A process that is asked to end, and then made to, when the block ends."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def __aenter__(self) -> Process:
        return self._process

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            if self._process.stdin is not None:
                await self._process.stdin.aclose()
            with anyio.move_on_after(STOP_SECONDS):
                await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


async def _watch(number: int, folder: Path, process: Process) -> None:
    """Tell where a node's dashboard is, and when the node ends by itself."""
    while process.returncode is None:
        owner = read_lock_owner(folder)
        if owner is not None and owner.port is not None:
            log.info("Node %d: %s", number, dashboard_url(owner.host, owner.port))
            break
        await anyio.sleep(LOOK_SECONDS)
    code = await process.wait()
    log.warning("Node %d ended with exit code %d; its output is in %s.", number, code, folder / OUTPUT_FILE)
