"""The first run on a desktop: the wizard in the browser, in the process and at the port of the node that follows."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from neuroshard.api.access import load_or_create_secret, new_entrance
from neuroshard.api.address import dashboard_url
from neuroshard.api.app import SetupContext, create_setup_app
from neuroshard.api.arrival import ArrivalDraft, FolderListBody, TextFolder
from neuroshard.api.presets import line_body
from neuroshard.api.server import ApiServer, bind
from neuroshard.api.setup import Finished, SetupChoices, SetupDraft, SetupFacts
from neuroshard.config.folders import prepare_data_dir
from neuroshard.config.instance_lock import AlreadyRunningError, InstanceLock
from neuroshard.config.loading import LoadedSettings, read_config
from neuroshard.config.saving import store_first_settings, store_first_token
from neuroshard.config.settings import SECRET_KEYS, Settings
from neuroshard.errors import ConflictError, NeuroShardError, StorageError, UsageError
from neuroshard.host.autostart import Place, places_of_this_computer, read_autostart, start_command, turn_on
from neuroshard.host.computer import default_threads
from neuroshard.host.desktop import can_show_pages, open_browser_at
from neuroshard.host.nvidia import training_gpus
from neuroshard.model.memory_limit import available_mb, probe_memory
from neuroshard.network.lan_runs import LanRuns, LanRunSearch
from neuroshard.network.line import StoredLine
from neuroshard.node.demo import DemoOptions, demo_folder
from neuroshard.node.process import (
    ListenerHandover,
    MainThreadWaker,
    StopRequest,
    outside_requests,
    show_first_instance,
)
from neuroshard.runs.chosen_run import ChosenRun, RunChoice, release_run
from neuroshard.runs.invited_settings import text_of
from neuroshard.types import LOOPBACK, is_loopback

LOOK_SECONDS = 60.0  # between checks whether the page has been closed for long
NOT_CARRIED = {*SECRET_KEYS, "token_file", "data_dir"}


@dataclass(frozen=True)
class Ready:
    """The result of a finished first run: the stored settings, and the lock and port that the node takes over."""

    loaded: LoadedSettings
    handover: ListenerHandover
    demo_folder: Path | None = None  # the demo starts there instead; nothing was stored


def asks_first(loaded: LoadedSettings, *, ends_with_stdin: bool) -> bool:
    """Return whether the wizard must ask for a token: none is set, and a desktop can show the page."""
    if loaded.settings.token is not None or not loaded.settings.browser or ends_with_stdin:
        return False
    return can_show_pages()


def run_first(loaded: LoadedSettings, load: Callable[[], LoadedSettings], link: str | None = None) -> Ready | None:
    """Show the wizard until it is finished; None if it was stopped or is open in another process.

    `load` reads the settings again after they are stored. `link` is an invitation that was opened: the wizard begins
    with it. Raises NeuroShardError if the wizard cannot be shown.
    """
    settings = loaded.settings
    prepare_data_dir(settings.data_dir)
    try:
        lock = InstanceLock.acquire(settings.data_dir)
    except AlreadyRunningError as running:
        show_first_instance(settings.data_dir, running.owner, open_browser=True)
        return None
    with ExitStack() as undo:
        undo.callback(lock.release)
        secret = load_or_create_secret(settings.data_dir)
        host = settings.host if is_loopback(settings.host) else LOOPBACK
        listener = undo.enter_context(bind(host, settings.port))
        port = int(listener.getsockname()[1])
        lock.announce(host, port, is_setup=True)
        run = _FirstRun(loaded, load, lock, (host, port))
        run.open_link(link)
        # The wizard's server closes the duplicate. Connections that arrive before the node's server starts wait in
        # the original.
        with run.waker:
            _serve(run, secret, listener.dup())
        if run.demo_folder is not None:
            undo.pop_all()
            lock.announce(host, port, page_folder=run.demo_folder)
            return Ready(loaded, ListenerHandover(run.lock, listener), run.demo_folder)
        if run.stored is None:
            sys.stdout.write(f"Stopped: {run.stop.reason}. Nothing was stored.\n")
            return None
        if run.lock is not lock:
            lock.release()
        undo.pop_all()  # lock and port belong to the node now: `undo` must not close them
    return Ready(run.stored, ListenerHandover(run.lock, _kept(listener, run.stored.settings, host, port)))


def _serve(run: _FirstRun, secret: str, listener: socket.socket) -> None:
    """Serve the wizard until the user finishes or stops it."""
    host, port = run.place
    server = ApiServer(create_setup_app(SetupContext(run.desk, secret, host, port, run.ask_to_stop)), listener)
    server.start()
    try:
        with outside_requests(run.stop, run.waker, ends_with_stdin=False), searched(run.desk.arrival.nearby):
            _show_page(run.loaded.settings.data_dir, dashboard_url(host, port))
            run.wait()
    finally:
        server.stop()


@contextmanager
def searched(found: LanRuns | None) -> Generator[None]:
    """Search the local network for runs in a thread, for as long as this block lasts. None: do not search."""
    if found is None:
        yield
        return
    with start_blocking_portal("trio") as portal:
        searching = portal.start_task_soon(LanRunSearch(found).run)
        try:
            yield
        finally:
            searching.cancel()


def _show_page(data_dir: Path, url: str) -> None:
    """Open the page in the browser. Its key is printed only to a terminal, never into a log."""
    entrance = new_entrance(data_dir, url, time.time())
    shown = entrance.address if sys.stdout.isatty() else url
    sys.stdout.write(f"NeuroShard is not set up yet. Your browser opens {shown}\n")
    sys.stdout.write("Without a browser: give the token with --token-file, or see `neuroshard --help`.\n")
    sys.stdout.flush()
    open_browser_at(entrance.page.as_uri())


def _kept(listener: socket.socket, settings: Settings, host: str, port: int) -> socket.socket | None:
    """Return the listener if the stored settings have the same address; otherwise close it."""
    if (settings.host if is_loopback(settings.host) else None) == host and settings.port in (port, 0):
        return listener
    listener.close()
    return None


def _locked(folder: Path) -> InstanceLock:
    """Lock the chosen folder. Raises ConflictError if a node runs on it."""
    prepare_data_dir(folder)
    try:
        return InstanceLock.acquire(folder)
    except AlreadyRunningError as error:
        raise ConflictError("A node is using this folder.", "Stop it, or choose another folder.") from error


def _places() -> tuple[Place, ...] | str:
    """The places of autostart entries, or the reason why this computer has none."""
    try:
        return places_of_this_computer(os.environ)
    except UsageError as error:
        return error.message


def surroundings_of(data_dir: Path, places: tuple[Place, ...] | str) -> SetupFacts:
    """Facts that the wizard shows about this computer. `places` are those of autostart, or the reason for none."""
    speed = StoredLine(data_dir).read()
    line = line_body(None, None) if speed is None else line_body(speed.upload, speed.measured_at)
    gpus = training_gpus()
    measured = {"memory": available_mb(probe_memory(), None), "cpu_threads": default_threads()}
    if isinstance(places, str):
        return SetupFacts(measured, line, gpus, autostart_possible=False, autostart_how=places)
    try:
        now = read_autostart(places)
    except StorageError as error:  # no reason not to set the node up
        return SetupFacts(measured, line, gpus, autostart_possible=False, autostart_how=str(error))
    return SetupFacts(measured, line, gpus, autostart_possible=True, autostart_how=f"{now.kind} {now.path}")


def arrival_of(loaded: LoadedSettings) -> ArrivalDraft:
    """The first question of the wizard. It is answered if the start names a run or data."""
    settings = loaded.settings
    is_given = any(loaded.sources[key] != "default" for key in ("run", "genesis", "text"))
    is_local = ip_address(settings.p2p_host).is_loopback
    public = release_run()
    is_searched = settings.network and settings.lan_discovery and not is_local and not is_given
    return ArrivalDraft(
        _text_in,
        _folders_in,
        is_local,
        None if public is None else public.name,
        LanRuns() if is_searched else None,
        purpose="given" if is_given else None,
    )


def _text_in(folder: Path) -> TextFolder:
    """Count the text files in a folder. Raises DataError."""
    from neuroshard.dataset import FolderText  # loads NumPy

    found = FolderText(folder).size()
    return TextFolder(folder, found.files, found.bytes)


def _folders_in(folder: Path) -> FolderListBody:
    """List a folder. Raises DataError."""
    from neuroshard.dataset.text_folders import list_text_folders

    return FolderListBody.model_validate(list_text_folders(folder))


def _store_run(data_dir: Path, run: ChosenRun | None) -> None:
    """Choose a run for the next start, or one of this computer's own. Raises StorageError."""
    if run is None:
        RunChoice(data_dir).leave()
    else:
        RunChoice(data_dir).choose(run)


class _FirstRun:
    """The wizard's draft and its completion. `_finish` runs in the server's thread, `wait` in the main thread."""

    def __init__(
        self, loaded: LoadedSettings, load: Callable[[], LoadedSettings], lock: InstanceLock, place: tuple[str, int]
    ) -> None:
        self.stop = StopRequest()
        self.waker = MainThreadWaker()
        self.lock = lock  # lock of the chosen folder
        self.stored: LoadedSettings | None = None
        self.demo_folder: Path | None = None
        self.place = place  # host and port
        self.loaded, self._load = loaded, load
        self._autostart = _places()
        arrival = arrival_of(loaded)
        facts = surroundings_of(loaded.settings.data_dir, self._autostart)
        self.desk = SetupDraft(loaded, facts, arrival, self._finish, self._start_demo)

    def open_link(self, link: str | None) -> None:
        """Begin with the invitation in a link that was opened, or in the settings. Raises InvitationError."""
        given = self.loaded.settings.invite
        text = link if given is None else link or text_of(given.get_secret_value())
        if text is not None:
            self.desk.arrival.open_link(text, time.time())

    def wait(self) -> None:
        """Wait until the wizard is finished, stopped or abandoned, so that a closed page leaves no process behind."""
        while self.stored is None and self.demo_folder is None and self.stop.reason is None:
            self.waker.wait(LOOK_SECONDS)
            if self.desk.is_abandoned():
                self.stop.ask("its page was closed for half an hour")

    def ask_to_stop(self, reason: str) -> None:
        """Stop without storing anything. Any thread may call this."""
        self.stop.ask(reason)
        self.waker.wake()

    def _start_demo(self) -> Finished:
        """Lock the demo's folder and let the main thread start the demo in it."""
        folder = demo_folder(self.loaded.settings.data_dir, DemoOptions())
        lock = _locked(folder)
        try:
            way_in = new_entrance(folder, dashboard_url(*self.place), time.time())
        except BaseException:
            lock.release()
            raise
        self.lock = lock  # that of the data folder stays locked until the process ends: a second start finds the demo
        self.demo_folder = folder
        self.waker.wake()
        return Finished(way_in.address)

    def _finish(self, choices: SetupChoices) -> Finished:
        first, folder = choices.first, self.loaded.settings.data_dir
        carried = read_config(self.loaded.config_file) if first.data_dir != folder else {}
        kept = {key: value for key, value in carried.items() if key not in NOT_CARRIED}
        lock = self.lock if first.data_dir == folder else _locked(first.data_dir)
        try:
            # The settings come last: they make the rest effective, so after a kill the next start asks again.
            # The token comes first: the run of a folder that belongs to another wallet must stay.
            store_first_token(first)
            _store_run(first.data_dir, choices.run)
            store_first_settings(replace(first, settings={**kept, **first.settings}))
            stored = self._load()
            url = dashboard_url(stored.settings.host, stored.settings.port or self.place[1])
            way_in = new_entrance(first.data_dir, url, time.time())  # another folder has another secret
        except BaseException:
            if lock is not self.lock:
                lock.release()
            raise
        warning = self._start_with_computer(stored) if choices.starts_with_computer else None
        self.lock = lock
        self.stored = stored  # last: the main thread takes over now, and reads both values
        self.waker.wake()
        return Finished(way_in.address, warning)

    def _start_with_computer(self, stored: LoadedSettings) -> str | None:
        """Turn autostart on; return the reason if that fails. The node runs in either case."""
        if isinstance(self._autostart, str):
            return self._autostart
        try:
            turn_on(self._autostart, start_command(stored))
        except NeuroShardError as error:
            return f"{error.message} {error.action}".strip()
        return None
