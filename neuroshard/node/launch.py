"""Starts and ends the process: signals and waiting in the main thread, all other work in threads with a parent."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from neuroshard import __version__
from neuroshard.api.access import load_or_create_secret, new_entrance
from neuroshard.api.address import dashboard_url
from neuroshard.api.app import create_app
from neuroshard.api.context import ApiContext
from neuroshard.api.model_tokens import ModelTokens
from neuroshard.api.server import ApiServer, bind
from neuroshard.config.folders import prepare_data_dir
from neuroshard.config.instance_lock import AlreadyRunningError, InstanceLock
from neuroshard.config.loading import LoadedSettings
from neuroshard.config.settings import Settings
from neuroshard.errors import NeuroShardError
from neuroshard.host.desktop import open_browser_at
from neuroshard.host.identity import wallet_of
from neuroshard.host.live_settings import Configuration
from neuroshard.identity.invitations import Invitation, to_code
from neuroshard.network.line import UploadLine
from neuroshard.node.demo import DemoOptions
from neuroshard.node.process import (
    ListenerHandover,
    MainThreadWaker,
    StopRequest,
    lower_session_share,
    outside_requests,
    show_first_instance,
    use_one_heap,
)
from neuroshard.runs.chosen_run import has_choice
from neuroshard.status.board import CommandChannel, StatusBoard
from neuroshard.status.computer import PathsStatus
from neuroshard.status.snapshot import NetworkState, NetworkStatus, NodeStatus
from neuroshard.telemetry.counters import Counters
from neuroshard.telemetry.logs import SHOWN_ELSEWHERE, ConfiguredLogging, LogRing, configure_logging
from neuroshard.telemetry.redaction import Redactor

if TYPE_CHECKING:
    from neuroshard.node.application import ExitReport


def summary(status: NodeStatus) -> str:
    """Summarise training, verdict and checkpoint in a few lines for the terminal."""
    training, checkpoints = status.training, status.checkpoints
    rows = [("steps", f"{training.steps:,}"), ("tokens", f"{training.tokens:,}")]
    if training.loss_ema is not None:
        rows.append(("training loss", f"{training.loss_ema:.3f} nats per token"))
    if training.held_out:
        first, last = training.held_out[0], training.held_out[-1]
        later = "" if last is first else f", {last.loss:.3f} at step {last.step}"
        rows.append(("held-out loss", f"{first.loss:.3f} at step {first.step}{later}"))
    rows.append(("verdict", status.verification.reason))
    if checkpoints.last_saved_step is not None:
        rows.append(("checkpoint", f"step {checkpoints.last_saved_step:,} in {checkpoints.folder}"))
    return "".join(f"{name:14} {value}\n" for name, value in rows)


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ended:
    """The exit code of a node, and the port at which it starts again, if it does."""

    exit_code: int
    port: int | None = None


def run_node(
    loaded: LoadedSettings,
    demo: DemoOptions | None = None,
    *,
    is_trainer: bool = False,
    ends_with_stdin: bool = False,
    handover: ListenerHandover | None = None,
    reload: Callable[[], LoadedSettings] | None = None,
    link: str | None = None,
) -> int:
    """Run a node or a trainer until a stop is requested and return the exit code.

    With `ends_with_stdin` the end of its input stops it too. `handover` is the folder's lock and the port that a first
    run holds already; both are released here. A node that is restarted or joins another run starts again here, with the
    settings that `reload` reads; None: it cannot. `link` is an invitation that was opened, which the page
    shows first. Raises NeuroShardError if the node cannot run.
    """
    use_one_heap()
    lower_session_share()
    while True:
        ended = _run_once(
            loaded,
            demo,
            is_trainer=is_trainer,
            ends_with_stdin=ends_with_stdin,
            handover=handover,
            link=link,
            may_restart=reload is not None,
        )
        if ended.exit_code != 0 or ended.port is None or reload is None:
            return ended.exit_code
        again = reload()
        same_page = {"port": ended.port, "browser": False}  # the page that is open finds the node again
        loaded, handover = replace(again, settings=again.settings.model_copy(update=same_page)), None
        link = None


def _run_once(
    loaded: LoadedSettings,
    demo: DemoOptions | None,
    *,
    is_trainer: bool,
    ends_with_stdin: bool,
    handover: ListenerHandover | None,
    link: str | None,
    may_restart: bool,
) -> _Ended:
    loaded, invitation, is_chosen = (loaded, None, False) if demo is not None else _invited(loaded)
    settings = loaded.settings
    started_at = time.time()
    wallet, _kind, warnings = wallet_of(loaded)  # first, so that a bad token is reported before anything is created
    prepare_data_dir(settings.data_dir)
    try:
        lock = InstanceLock.acquire(settings.data_dir) if handover is None else handover.lock
    except AlreadyRunningError as running:
        return _Ended(show_first_instance(settings.data_dir, running.owner, open_browser=settings.browser))
    with ExitStack() as stack:
        stack.callback(lock.release)
        ring, commands, counters = LogRing(), CommandChannel(), Counters()
        redactor = Redactor(settings.token.get_secret_value() if settings.token else "")
        if invitation is not None:
            redactor.add(to_code(invitation))
        stack.enter_context(_logging(settings, ring, redactor))
        secret = load_or_create_secret(settings.data_dir)
        redactor.add(secret)
        listener = stack.enter_context((handover and handover.listener) or bind(settings.host, settings.port))
        port = int(listener.getsockname()[1])
        lock.announce(settings.host, port)
        board = StatusBoard(first_status(loaded, started_at, warnings, is_demo=demo is not None))
        configuration = Configuration(loaded)
        context = ApiContext(
            board,
            commands,
            ring,
            secret,
            configuration.view,
            settings.host,
            port,
            counters,
            redactor,
            model_tokens=ModelTokens(settings.data_dir),
            opened_link=link,
        )
        _serve(context, listener, stack)
        _show_dashboard(settings, port, warnings, open_browser=settings.browser and handover is None)
        stop = StopRequest(may_restart=may_restart)
        with MainThreadWaker() as waker, outside_requests(stop, waker, ends_with_stdin=ends_with_stdin):
            _prepare_native_threads()
            from neuroshard.node.application import Application, ProcessContext  # slow: the dashboard answers meanwhile

            place = ProcessContext(
                configuration, wallet, board, counters, stop, demo, is_trainer, invitation, is_chosen
            )
            report = _run_to_the_end(Application(place, commands).run, waker)
        if demo is not None and demo.steps is not None:
            sys.stdout.write(summary(board.current()))
        return _Ended(report.exit_code, port if stop.starts_again else None)


def _invited(loaded: LoadedSettings) -> tuple[LoadedSettings, Invitation | None, bool]:
    """The settings of the invited or chosen run, its invitation, and whether the run was chosen here before."""
    if loaded.settings.invite is None and not has_choice(loaded.settings.data_dir):
        return loaded, None, False
    from neuroshard.runs.invited_settings import invited_settings  # slow, and needed only here

    invited = invited_settings(loaded)
    return invited.loaded, invited.invitation, invited.is_chosen


def _serve(context: ApiContext, listener: socket.socket, stack: ExitStack) -> None:
    """Serve the dashboard and the API until the stack is closed."""
    server = ApiServer(create_app(context), listener)
    server.start()
    stack.callback(server.stop)


def _logging(settings: Settings, ring: LogRing, redactor: Redactor) -> ConfiguredLogging:
    return configure_logging(
        verbose=settings.verbose, as_json=settings.log_json, ring=ring, folder=settings.paths.logs, redactor=redactor
    )


def first_status(loaded: LoadedSettings, now: float, warnings: tuple[str, ...], *, is_demo: bool) -> NodeStatus:
    """Status that the dashboard shows before the node's work has begun."""
    settings = loaded.settings
    paths = {name: str(path) for name, path in asdict(settings.paths).items()}
    network = NetworkStatus(NetworkState.STARTING, "Connecting.") if settings.network else NetworkStatus()
    return NodeStatus(
        version=__version__,
        started_at=now,
        time=now,
        state_reason="Starting.",
        data_dir=str(settings.data_dir),
        paths=PathsStatus(**paths),
        is_demo=is_demo,
        warnings=warnings,
        network=replace(network, upload_limit=UploadLine(settings.data_dir).limit(settings)),
    )


def _show_dashboard(settings: Settings, port: int, warnings: tuple[str, ...], *, open_browser: bool) -> None:
    url = dashboard_url(settings.host, port)
    _LOG.info("NeuroShard %s. Dashboard: %s", __version__, url)
    for warning in warnings:
        _LOG.warning("%s", warning)
    if open_browser:
        open_browser_at(new_entrance(settings.data_dir, url, time.time()).page.as_uri())
    else:
        _LOG.info("`neuroshard open --data-dir %s` opens it.", shlex.quote(str(settings.data_dir)))


def _prepare_native_threads() -> None:
    """Set the environment that the matrix library reads when it is loaded; values set by the owner stay."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # not for the compute thread, which sets its own number
    # A thread of GNU OpenMP spins before it sleeps. If another program uses a core, the default is far too long:
    # with this value training was 1.3 times as fast then, and no slower alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _run_to_the_end(run: Callable[[], ExitReport], waker: MainThreadWaker) -> ExitReport:
    """Run the task tree in its own thread. The main thread only waits for it and for signals."""
    with ThreadPoolExecutor(1, thread_name_prefix="neuroshard-tasks") as executor:
        outcome: Future[ExitReport] = executor.submit(run)
        outcome.add_done_callback(lambda _: waker.wake())
        while not outcome.done():
            waker.wait()
        try:
            report = outcome.result()
        except NeuroShardError as error:  # the command line prints it; the log file must contain it too
            _LOG.error("The node ended: %s", error, extra={SHOWN_ELSEWHERE: True})
            raise
        _LOG.info("%s", report.message)
        return report
