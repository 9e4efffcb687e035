"""The organiser as a process: run, key, capacity, database and listening socket. No PyTorch."""

from __future__ import annotations

import logging
import re
import secrets
import signal
import socket
import sqlite3
import threading
import time
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

import msgspec
from fastapi import FastAPI
from msgspec import Meta, Struct
from uvicorn import Config, Server

from neuroshard.config.folders import prepare_data_dir
from neuroshard.config.instance_lock import AlreadyRunningError, InstanceLock
from neuroshard.errors import NetworkRefusedError, StorageError, UsageError
from neuroshard.identity import Wallet, public_key_of
from neuroshard.identity.admissions import MAX_JOIN_BYTES, AdmissionRevocation, sign_admission_revocation
from neuroshard.identity.claims import sign_message
from neuroshard.identity.signing import SigningKey
from neuroshard.network.guarded_http import MOST_HEADER_BYTES, GuardedConnection
from neuroshard.organiser.application import OrganiserContext, create_organiser_app
from neuroshard.organiser.database import DATABASE, Database, open_database
from neuroshard.organiser.desk import AdmissionDesk, RunPlan
from neuroshard.organiser.ended_passes import EndedPasses
from neuroshard.organiser.history import RunHistory
from neuroshard.organiser.monitor import RunMonitor
from neuroshard.organiser.observer_process import OBSERVER, ObserverProcess
from neuroshard.organiser.places import TRAINER, StagePlaces, stage_name
from neuroshard.organiser.port_check import PortChecks
from neuroshard.organiser.public import NewestRun
from neuroshard.organiser.seeds import SeedBook
from neuroshard.runs.authority_key import (
    OrganiserAddress,
    load_or_create_authority_key,
    organiser_address,
    organiser_folder,
)
from neuroshard.runs.creation import write_offer
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stage_plan import planned_stages
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.telemetry.logs import configure_logging
from neuroshard.types import (
    LATEST_TIME,
    LOOPBACK,
    WALLET_ID_DIGITS,
    HexDigest,
    NamedWallet,
    NodeId,
    WalletId,
    is_loopback,
)

_LOG = logging.getLogger(__name__)

DEFAULT_LISTEN = "127.0.0.1:8800"
REPLICAS = 4  # per stage
TRAINERS = 1000
MOST_WANTED = 10_000
MAX_CAPACITY_BYTES = 64 * 1024
MAX_REASON_CHARACTERS = 200
RUN_FILE = "run.json"  # of the observer
MOST_REQUESTS = 512  # at once, with the connections
BACKLOG = 512


@dataclass(frozen=True)
class Capacity:
    """Number of nodes that a run wants: for each stage, and of trainers."""

    replicas: int = REPLICAS
    trainers: int = TRAINERS
    of_stage: Mapping[str, int] | None = None

    def places(self, offer: RunOffer) -> tuple[StagePlaces, ...]:
        """The places of a run. Raises UsageError if a stage is named that the run does not have."""
        planned = planned_stages(offer.parameters)
        names = [stage_name(index, len(planned)) for index in range(len(planned))]
        given = self.of_stage or {}
        if unknown := sorted(given.keys() - set(names)):
            raise UsageError(f"The run has no stage {unknown[0]!r}.", f"Its stages are {', '.join(names)}.")
        held = (
            StagePlaces(name, stage.layers, stage.tier_mb, given.get(name, self.replicas))
            for name, stage in zip(names, planned, strict=True)
        )
        return (*held, StagePlaces(TRAINER, None, 0, self.trainers))


def read_capacity(path: Path) -> Capacity:
    """Read a file with `replicas`, `trainers` and a table `stages`. Raises UsageError and StorageError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CAPACITY_BYTES + 1)
        if len(data) > MAX_CAPACITY_BYTES:
            raise UsageError(f"{path} is larger than {MAX_CAPACITY_BYTES:,} bytes.", "A few lines are enough.")
        found: dict[str, Any] = tomllib.loads(data.decode())
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be used: {error}.", _EXAMPLE) from None
    if unknown := sorted(found.keys() - {"replicas", "trainers", "stages"}):
        raise UsageError(f"{path} has an unknown name: {unknown[0][:60]}.", _EXAMPLE)
    stages = found.get("stages", {})
    if not isinstance(stages, dict):
        raise UsageError(f"{path}: stages is not a table.", _EXAMPLE)
    table = cast("dict[str, Any]", stages)
    return Capacity(
        _count(path, "replicas", found.get("replicas", REPLICAS)),
        _count(path, "trainers", found.get("trainers", TRAINERS)),
        {name: _count(path, name, value) for name, value in table.items()},
    )


_EXAMPLE = "For example: replicas = 4, trainers = 100, and a table [stages] with head-0 = 8."


def _count(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_WANTED:
        raise UsageError(f"{path}: {name[:60]} must be a whole number from 0 to {MOST_WANTED:,}.", _EXAMPLE)
    return value


@dataclass(frozen=True)
class OrganiserOptions:
    """The options of `neuroshard organise`, checked."""

    data_dir: Path
    host: str
    port: int
    public_url: str | None
    capacity: Capacity
    verbose: bool = False
    log_json: bool = False
    observer: Callable[[Path], Sequence[str]] | None = None  # command that observes the run file; None: no monitor
    peers: Sequence[str] = ()  # addresses of nodes of the run, which joiners get
    trusts_proxy: bool = False  # see OrganiserContext

    @property
    def is_local(self) -> bool:
        """Whether only this computer can reach the organiser."""
        return is_loopback(self.host) and self.public_url is None


def listen_address(text: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 address is in brackets. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise UsageError(f"--listen {text[:100]!r} is not HOST:PORT.", f"For example: --listen {DEFAULT_LISTEN}")
    return host, int(port)


def checked_url(url: str) -> str:
    """Return a public URL without a final slash: https, or http on this computer. Raises UsageError."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host, parts = "", urlsplit("")
    is_plain = not parts.query and not parts.fragment and parts.username is None
    if not host or not is_plain or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))):
        raise UsageError(f"{url[:200]!r} is not an https:// address.", "Members send signed claims to it over https.")
    return url.rstrip("/")


def authority_for(offer: RunOffer, data_dir: Path) -> SigningKey:
    """Return this computer's authority key if the run names it. Raises UsageError, StorageError."""
    if offer.parameters.admission != "admitted":
        raise UsageError(
            f"Run {offer.run_id[:16]} has admission = {offer.parameters.admission}, so its nodes need no organiser.",
            'Create a run with admission = "admitted".',
        )
    key = load_or_create_authority_key(data_dir)
    if key.public_key.hex() not in offer.parameters.authority:
        raise UsageError(
            f"Run {offer.run_id[:16]} does not name the key of this organiser, {key.public_key.hex()}.",
            "Its owner adds the key to `authority` with `neuroshard run create --update`. Or use the data folder in "
            "which the run was created.",
        )
    return key


def run_organiser(offer: RunOffer, options: OrganiserOptions, announce: Callable[[str], object]) -> int:
    """Serve until SIGINT or SIGTERM and return the exit code. `announce` gets the address as soon as it answers.

    Raises UsageError, StorageError, and NetworkRefusedError if the port is in use or another organiser runs.
    """
    prepare_data_dir(options.data_dir)
    plan = RunPlan(offer, options.capacity.places(offer))
    key = authority_for(offer, options.data_dir)
    ended = EndedPasses(offer, StoredPasses(options.data_dir, offer))
    folder = organiser_folder(options.data_dir, offer.run_id)
    with ExitStack() as stack:
        stack.callback(_lock(folder).release)
        stack.enter_context(configure_logging(verbose=options.verbose, as_json=options.log_json, folder=folder))
        listener = stack.enter_context(listener_at(options.host, options.port))
        if options.public_url is not None:
            organiser_address(options.data_dir, offer.run_id).write(OrganiserAddress(options.public_url))
        database, warning = open_database(folder)
        stack.callback(database.close)
        try:
            desk = AdmissionDesk(
                plan,
                key,
                database,
                ended,
                now=time.time,
                monotonic=time.monotonic,
                random_name=lambda: secrets.token_hex(16),
            )
            given = (*options.peers, *offer.parameters.seeds)
            seeds = SeedBook(given, database.addresses(), time.monotonic())
        except sqlite3.Error as error:
            raise StorageError(f"The database in {folder} cannot be used: {error}.", "Check the disk.") from error
        monitor = stack.enter_context(_monitored(plan, folder, key, options))
        context = OrganiserContext(
            plan,
            desk,
            time.time,
            time.monotonic,
            warning,
            monitor,
            seeds=seeds,
            checks=PortChecks(time.monotonic, is_local=options.is_local),
            newest=NewestRun(offer, (options.data_dir, folder / OBSERVER)),
            trusts_proxy=options.trusts_proxy,
        )
        app = create_organiser_app(context)
        host, port = listener.getsockname()[:2]

        def started() -> None:
            announce(options.public_url or f"http://{f'[{host}]' if ':' in host else host}:{port}")
            _LOG.info("The organiser of run %s serves on %s port %d.", offer.run_id[:16], host, port)

        server_of(app, started).run(sockets=[listener])
    return 0


@contextmanager
def _monitored(plan: RunPlan, folder: Path, key: SigningKey, options: OrganiserOptions) -> Generator[RunMonitor | None]:
    """The monitor of the run with its observer; None if it is not wanted. Raises StorageError."""
    if options.observer is None:
        yield None
        return
    place = folder / OBSERVER
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        write_offer(plan.offer, place / RUN_FILE)
        history = RunHistory(folder / DATABASE)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"The history of the run in {folder} cannot be used: {error}.", "Check the disk.") from error
    with closing(history):
        monitor = RunMonitor(plan, history, time.time)
        observer = ObserverProcess(
            options.observer(place),
            plan.offer.run_id,
            key,
            monitor.note,
            output=place / "output.log",
            now=time.time,
        )
        observer.start()
        try:
            yield monitor
        finally:
            observer.stop()


def server_of(app: FastAPI, started: Callable[[], object] = lambda: None) -> Server:
    """The server of the organiser's application. It closes slow and idle connections, as the API of a node does.

    `started` is called as soon as the server answers without delay.
    The address of a client is that of X-Forwarded-For only if a proxy on this computer sends the request.
    """
    config = Config(
        app,
        http=GuardedConnection,
        ws="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=True,
        forwarded_allow_ips=["127.0.0.1", "::1"],  # not what the environment says
        limit_concurrency=MOST_REQUESTS,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
    )
    return _Server(config, app, started)


class ListChange(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The owner's statement about the allow-list, which is stored with the list."""

    run_id: HexDigest
    change: Literal["allow", "deny", "anyone"]
    wallet: NamedWallet | None  # None: any wallet may join
    at: Annotated[int, Meta(ge=0, le=LATEST_TIME)]


LIST_CHANGE = "allow-list change"  # kind of the signed message


def change_allow_list(
    offer: RunOffer, data_dir: Path, owner: Wallet, wallet: str | None, *, is_allowed: bool
) -> int | None:
    """Put a wallet on the allow-list of a run, or take it off; None drops the list, so that any wallet may join.

    Returns the length of the list, None without one. A running organiser applies it to the next join. Raises UsageError
    if the wallet is malformed or the run is not this owner's, and StorageError.
    """
    if owner.wallet_id != offer.owner:
        raise UsageError("Only the owner of a run changes its list.", "Use the owner's token.")
    named = None if wallet is None else _checked_wallet(wallet)
    change = "anyone" if named is None else "allow" if is_allowed else "deny"
    signed = sign_message(owner, LIST_CHANGE, ListChange(offer.run_id, change, named, int(time.time())))
    with _opened(offer, data_dir) as database, database.writing():
        database.keep_list_change(msgspec.msgpack.encode(signed))
        if named is None:
            database.allow_anyone()
        elif is_allowed:
            database.allow(named)
        else:
            database.disallow(named)
        allowed = database.allowed()
        return None if allowed is None else len(allowed)


def end_places(offer: RunOffer, data_dir: Path, named: str, reason: str, now: float) -> None:
    """End the place of a node, or those of a wallet, for ever. Members learn it with their next refresh.

    Raises UsageError if the name is neither, or the run does not name the key of this organiser; StorageError.
    """
    key = authority_for(offer, data_dir)
    try:
        public_key_of(named)
        node, wallet = NodeId(named), None
    except ValueError:
        node, wallet = None, _checked_wallet(named)
    statement = AdmissionRevocation(offer.run_id, node, wallet, reason[:MAX_REASON_CHARACTERS], int(now))
    with _opened(offer, data_dir) as database:
        database.keep_revocation(named, sign_admission_revocation(key, statement))
        if wallet is not None:
            database.show_name(wallet, "")


def _checked_wallet(text: str) -> WalletId:
    if not re.fullmatch(f"[0-9a-f]{{{WALLET_ID_DIGITS}}}", text):
        raise UsageError(f"{text[:60]!r} is not the id of a wallet.", "`neuroshard status` prints its 32 digits there.")
    return WalletId(text)


@contextmanager
def _opened(offer: RunOffer, data_dir: Path) -> Generator[Database]:
    """The database of a run, next to an organiser that may run. Raises StorageError, also if it cannot be used."""
    folder = organiser_folder(data_dir, offer.run_id)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(Database(folder / DATABASE)) as database:
            yield database
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"The database in {folder} cannot be used: {error}.", "Check the disk.") from error


class _Server(Server):
    """Uvicorn's server that ends with exit code 0 after a signal, instead of sending the signal to itself again."""

    def __init__(self, config: Config, app: FastAPI, started: Callable[[], object]) -> None:
        super().__init__(config)
        self._app = app
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await _warm_up(self._app)
        await super().startup(sockets)
        if self.started:
            self._started()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread handles signals
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _warm_up(app: FastAPI) -> None:
    """Send requests that are refused for their length, because the first request of each kind takes 0.1 s more."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(MAX_JOIN_BYTES + 1), "more_body": False}

    async def send(_: object) -> None: ...

    for method, path in (("PUT", "join"), ("PUT", "authorization_status"), ("POST", "refresh"), ("POST", "leave")):
        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "scheme": "http", "method": method}
        scope |= {"path": f"/api/{path}", "raw_path": f"/api/{path}".encode(), "query_string": b"", "headers": []}
        await app(scope | {"client": (LOOPBACK, 0), "server": (LOOPBACK, 0)}, receive, send)


def listener_at(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. Raises NetworkRefusedError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # asyncio sends answers without delay only on sockets that name TCP; accepted sockets do as their listener does
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=made.detach())
    except OSError as error:
        raise NetworkRefusedError(
            f"Port {port} on {host} cannot be used: {error.strerror or error}.", "Choose another --listen HOST:PORT."
        ) from error


def _lock(folder: Path) -> InstanceLock:
    try:
        return InstanceLock.acquire(folder)
    except AlreadyRunningError as running:
        raise NetworkRefusedError(
            f"An organiser of this run already runs on {folder} (process {running.owner.pid}).", "Stop it first."
        ) from None
