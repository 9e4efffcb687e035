"""The demo: a folder and a throw-away wallet, embedded data on loopback, and the further nodes of `--nodes N`."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio.abc import Process

from neuroshard.api.address import dashboard_url
from neuroshard.config.folders import this_program
from neuroshard.config.instance_lock import read_lock_owner
from neuroshard.config.state_file import write_atomically
from neuroshard.errors import StorageError
from neuroshard.identity import Wallet
from neuroshard.identity.invitations import FILE_SUFFIX, InvitationTerms, InvitedPlaces, invite, to_code
from neuroshard.identity.signing import SEED_BYTES
from neuroshard.runs.offer import RunOffer
from neuroshard.types import LOOPBACK

if TYPE_CHECKING:
    from neuroshard.dataset import BuiltGenesis, GenesisServer
    from neuroshard.dataset.build_text import StageProgress

DEMO_FOLDER = "demo"
WALLET_FILE = "wallet"


@dataclass(frozen=True)
class DemoOptions:
    """The command line's options of `neuroshard demo`."""

    steps: int | None = None  # end after this many further steps
    text_folder: Path | None = None  # the user's own text instead of the embedded one
    nodes: int = 1  # processes that train one run together on this computer
    stages: int = 1  # pipeline stages of the model

    @property
    def stages_a_node(self) -> int | None:
        """Largest number of stages that a node begins with; None for a lone node, which holds all."""
        return None if self.nodes == 1 else -(-self.stages // self.nodes)

    @property
    def spare_stages_a_node(self) -> int:
        """Number of further stages that a node may hold, so that the others can replace a node that disappears."""
        if self.nodes == 1:
            return 0
        usual, of_the_others = -(-self.stages // self.nodes), -(-self.stages // (self.nodes - 1))
        return min(self.stages, max(usual + 1, of_the_others)) - usual


def demo_folder(data_dir: Path, options: DemoOptions) -> Path:
    """Data folder of the demo. Each number of stages and each text folder has its own, so that runs do not mix."""
    base = data_dir / DEMO_FOLDER
    if options.stages > 1:
        base /= f"stages-{options.stages}"
    if options.text_folder is None:
        return base
    return base / f"text-{sha256(str(options.text_folder.resolve()).encode()).hexdigest()[:12]}"


def demo_folders(data_dir: Path) -> tuple[Path, ...]:
    """Data folders of all demos that were ever started, with any options; for a swarm, the first node's folder."""
    base = data_dir / DEMO_FOLDER
    kinds = ("text-*", "stages-*", "stages-*/text-*")
    found = (base, *(folder for kind in kinds for folder in sorted(base.glob(kind))))
    return tuple(folder for folder in found if (folder / WALLET_FILE).exists())


def demo_token(folder: Path) -> str:
    """Token of the demo folder's throw-away wallet (64 hex digits), created on first use so that a restart resumes.

    Raises StorageError if the folder cannot be used.
    """
    file = folder / WALLET_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            temporary = folder / f".{WALLET_FILE}.{os.getpid()}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                stream.write(secrets.token_hex(32))
            temporary.replace(file)
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise StorageError(
            f"Cannot use the demo folder {folder}: {error}.", "Name a writable one with --data-dir."
        ) from error


class EmbeddedData:
    """A Genesis folder built from text on this computer, and the loopback server that replaces a CDN."""

    def __init__(self, folder: Path, text: Path | None, wallet: Wallet) -> None:
        """`text` is a folder of the owner's; None: the documentation in the Python installation."""
        self._folder = folder / "genesis"
        self._text = text
        self._wallet = wallet
        self._server: GenesisServer | None = None

    def build(self, progress: StageProgress) -> BuiltGenesis:
        """Build the folder, or reuse it. Raises DataError or StorageError."""
        from neuroshard.dataset import FolderText, StandardLibraryText, build_genesis  # slow: the dashboard comes first

        source = StandardLibraryText() if self._text is None else FolderText(self._text)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return build_genesis(source, self._folder, self._wallet, now=now, progress=progress)

    def serve(self) -> str:
        """Start the server and return the URL of the data set."""
        from neuroshard.dataset import GenesisServer

        self._server = GenesisServer(self._folder)
        return self._server.start()

    def close(self) -> None:
        """Stop the server if it was started."""
        if self._server is not None:
            self._server.stop()


_LOG = logging.getLogger(__name__)

OUTPUT_FILE = "output.txt"
INVITED_SECONDS = 24 * 3600.0
STOP_SECONDS = 30.0  # for a final checkpoint
LOOK_SECONDS = 0.25


def write_demo_invitation(folder: Path, wallet: Wallet, run: RunOffer, peer: str, nodes: int) -> Path:
    """Invite the further nodes of a demo to its run; return the file. `peer` is an address of the first node."""
    terms = InvitationTerms(time.time() + INVITED_SECONDS, nodes, "demo")
    places = InvitedPlaces(run.parameters.name, (peer,))
    invitation = invite(wallet, run.run_id, terms, places, seed=secrets.token_bytes(SEED_BYTES))
    file = folder / f"demo{FILE_SUFFIX}"
    try:
        write_atomically(file, to_code(invitation).encode())
    except OSError as error:
        raise StorageError(f"Cannot write {file}: {error}.", "Free space, or name another --data-dir.") from error
    return file


@dataclass(frozen=True)
class FurtherNodes:
    """Values that the further nodes need to join the first node's run."""

    invitation: Path
    genesis: str  # address of its data server
    max_stages: int | None = None  # largest number that a node begins with
    spare_stages: int = 0  # further ones that it may take when no other node holds them
    max_storage: int | None = None  # MB of cached shards per node
    is_training: bool = True  # False: the node starts paused


class LocalSwarm:
    """Starts the nodes 2..count in `<folder>/node-<k>`; they end when it does."""

    def __init__(self, folder: Path, count: int, threads_each: int) -> None:
        self._folder = folder
        self._count = count
        self._threads = threads_each

    async def run(self, shared: FurtherNodes) -> None:
        """Start the nodes and monitor them until cancelled, or until all have ended. Raises StorageError."""
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            for number in range(2, self._count + 1):
                folder = self._folder / f"node-{number}"
                demo_token(folder)
                command = node_command(folder, shared, self._threads)
                process = await stack.enter_async_context(await started(command, folder / OUTPUT_FILE))
                tasks.start_soon(_watch, number, folder, process)


def node_command(folder: Path, shared: FurtherNodes, threads: int) -> list[str]:
    """Command line of a further node. The node ends when its standard input closes, so it cannot outlive this one."""
    options: Mapping[str, str] = {
        "--data-dir": str(folder),
        "--token-file": str(folder / WALLET_FILE),
        "--genesis": shared.genesis,
        "--invite": str(shared.invitation),
        "--p2p-host": LOOPBACK,
        "--port": "0",
        "--cpu-threads": str(threads),
    }
    limits = {
        "--max-stages": shared.max_stages,
        "--spare-stages": shared.spare_stages,
        "--max-storage": shared.max_storage,
    }
    options = {**options, **{name: str(limit) for name, limit in limits.items() if limit is not None}}
    flat = [part for option in options.items() for part in option]
    switches = ["--headless", "--end-with-stdin", *([] if shared.is_training else ["--no-training"])]
    return [*this_program(), *flat, *switches]


async def started(command: list[str], output: Path) -> _Leashed:
    """Start a process that writes its output to a file, without this process's NEUROSHARD_ variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    with output.open("wb") as file:
        process = await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    return _Leashed(process)


class _Leashed:
    """A process that is asked to end when the block ends, and killed if it has not ended after STOP_SECONDS."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def __aenter__(self) -> Process:
        return self._process

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):  # this node is being cancelled, and the process must not outlive it
            if self._process.stdin is not None:
                await self._process.stdin.aclose()
            with anyio.move_on_after(STOP_SECONDS):
                await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


async def _watch(number: int, folder: Path, process: Process) -> None:
    """Log the address of a node's dashboard, and a warning if the node ends by itself."""
    while process.returncode is None:
        owner = read_lock_owner(folder)
        if owner is not None and owner.port is not None:
            url = dashboard_url(owner.host, owner.port)
            _LOG.info("Node %d: %s, opened by `neuroshard open --data-dir %s`", number, url, folder)
            break
        await anyio.sleep(LOOK_SECONDS)
    code = await process.wait()
    _LOG.warning("Node %d ended with exit code %d; its output is in %s.", number, code, folder / OUTPUT_FILE)
