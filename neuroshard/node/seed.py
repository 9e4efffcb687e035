"""A seed: a node that trains nothing. Newcomers begin with its address and find the nodes of their run through it.

It knows runs only from the records that nodes store in the directory, and relays for nodes that cannot be dialled. It
stores its node key, so that its address survives a restart, addresses of known peers, and the measured speed of its
line. No token, no model, no PyTorch.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
import trio

from neuroshard import __version__
from neuroshard.config.folders import prepare_data_dir
from neuroshard.config.instance_lock import AlreadyRunningError, InstanceLock
from neuroshard.config.loading import LoadedSettings, load_settings, resolve_data_dir
from neuroshard.config.settings import Settings
from neuroshard.errors import NetworkRefusedError
from neuroshard.host.identity import node_identity
from neuroshard.identity import TokenSecret, Wallet
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.handshake import HANDSHAKE
from neuroshard.membership.network_opening import PEERS_FILE, libp2p_opener, use_surroundings
from neuroshard.messages import Frame
from neuroshard.network import Network, RequestRefusedError
from neuroshard.network.limits import UploadPacer
from neuroshard.network.line import UploadLine
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.tasks import accompanied
from neuroshard.network.transport import Connection
from neuroshard.runs.exchange import RUN_KIND
from neuroshard.telemetry.logs import configure_logging
from neuroshard.types import NodeId

_LOG = logging.getLogger(__name__)

SEED_FOLDER = "seed"
DEFAULT_PORT = 4001
LOOK_SECONDS = 1.0
COUNT_SECONDS = 600.0  # between two log lines with the number of connected nodes
_UNUSED = ("NEUROSHARD_TOKEN", "NEUROSHARD_TOKEN_FILE")


def seed_settings(flags: Mapping[str, object], data_dir: Path | None, environment: Mapping[str, str]) -> LoadedSettings:
    """Load a seed's settings. It has its own folder inside the data folder, and a fixed port by default.

    Raises the same errors as `load_settings`.
    """
    folder = resolve_data_dir(data_dir, environment) / SEED_FOLDER
    variables = {name: value for name, value in environment.items() if name not in _UNUSED}
    loaded = load_settings({**flags, "data_dir": folder}, variables)
    if loaded.sources["p2p_port"] != "default":
        return loaded
    return load_settings({**flags, "data_dir": folder, "p2p_port": DEFAULT_PORT}, variables)


def run_seed(loaded: LoadedSettings) -> int:
    """Run a seed until SIGINT or SIGTERM and return the exit code.

    Raises NetworkRefusedError if its port is in use or a seed runs on this folder already, and StorageError.
    """
    settings = loaded.settings
    prepare_data_dir(settings.data_dir)
    with ExitStack() as stack:
        stack.callback(_lock(settings.data_dir).release)
        stack.enter_context(
            configure_logging(verbose=settings.verbose, as_json=settings.log_json, folder=settings.paths.logs)
        )
        trio.run(_main, loaded)  # pyright: ignore[reportUnknownMemberType]
    return 0


async def _main(loaded: LoadedSettings) -> None:
    settings = loaded.settings
    wallet = Wallet.from_secret(TokenSecret("hex", secrets.token_bytes(32)))  # not kept: nothing refers to it later
    identity = node_identity(wallet, settings.data_dir)
    _LOG.info("NeuroShard %s: a seed, node %s", __version__, identity.node_id)
    outside = ExternalAddresses()
    line = UploadLine(settings.data_dir)
    upload = UploadPacer(line.limit(settings))
    networking = Networking(
        identity.node_id,
        libp2p_opener(settings, identity, outside, upload=upload, uses_relays=False, serves_others=True),
        peers_file=settings.data_dir / PEERS_FILE,
        given=settings.peer,
    )
    networking.attach(_refuse_what_needs_a_run)
    use_surroundings(settings, identity.node_id, networking, outside)

    async def serve() -> None:
        await networking.run(must_open=True)

    def connections() -> Iterable[Connection]:
        network = networking.current
        return () if network is None else network.transport.connections()

    async def pace() -> None:
        await pace_upload(settings, line, upload, connections, time.time)

    await accompanied(
        _until_stopped, serve, pace, lambda: _print_addresses(networking), lambda: _log_connected(networking)
    )


async def pace_upload(
    settings: Settings,
    line: UploadLine,
    upload: UploadPacer,
    connections: Callable[[], Iterable[Connection]],
    now: Callable[[], float],
) -> None:
    """Measure the line every LOOK_SECONDS, and keep the upload at the owner's limit and share of it. Never returns."""
    while True:
        await anyio.sleep(LOOK_SECONDS)
        line.look(connections(), now())
        upload.limit(line.limit(settings))


async def _refuse_what_needs_a_run(network: Network) -> None:
    """Answer requests that only a node of a run can serve with a refusal that names this node as a seed."""

    async def refuse(_sender: NodeId, _request: Frame) -> Frame:
        raise RequestRefusedError("This is a seed: it serves no run. Look for nodes of the run in the directory.")

    for kind in (HANDSHAKE, RUN_KIND):
        network.transport.serve(kind, refuse, for_anyone=True)
    await anyio.lowlevel.checkpoint()


async def _until_stopped() -> None:
    """Wait for the first signal. Afterwards the previous handlers apply again: a second one ends the process."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            _LOG.info("Stopping: %s received.", signal.Signals(number).name)
            return


async def _print_addresses(networking: Networking) -> None:
    """Print this seed's addresses, one per line and nothing else, whenever they change."""
    printed: tuple[str, ...] = ()
    while True:
        network = networking.current
        addresses = printed if network is None else network.transport.addresses()
        if addresses != printed:
            if printed:
                _LOG.info("The addresses changed: nodes can start with --peer %s", " or --peer ".join(addresses))
            printed = addresses
            with suppress(BrokenPipeError):  # the reader has closed its end; the log contains changed addresses too
                sys.stdout.write("".join(f"{address}\n" for address in addresses))
                sys.stdout.flush()
        await anyio.sleep(LOOK_SECONDS)


async def _log_connected(networking: Networking) -> None:
    """Log the number of connected nodes every COUNT_SECONDS if it has changed."""
    logged = 0
    while True:
        await anyio.sleep(COUNT_SECONDS)
        network = networking.current
        connected = 0 if network is None else len(network.transport.peers())
        if connected != logged:
            logged = connected
            _LOG.info("%d nodes are connected.", connected)


def _lock(folder: Path) -> InstanceLock:
    try:
        return InstanceLock.acquire(folder)
    except AlreadyRunningError as running:
        raise NetworkRefusedError(
            f"A seed already runs on {folder} (process {running.owner.pid}).", "Stop it, or name another --data-dir."
        ) from None
