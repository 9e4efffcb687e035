"""Client of a running node's REST API for commands. It reads the secret from the data folder and follows restarts."""

from __future__ import annotations

import ssl
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import httpx

from neuroshard.cli.options import node_folder
from neuroshard.errors import NetworkRefusedError, NeuroShardError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from neuroshard.api.access import Entrance


READ_SECONDS = 30.0
COMMAND_SECONDS = 70.0  # the node itself gives up on a command after at most 60 s


class NodeRefusedError(NeuroShardError):
    """The node answered with an error; `code` is that of OpenAI's API, if it has one."""

    def __init__(self, message: str, action: str = "", code: str | None = None) -> None:
        super().__init__(message, action)
        self.code = code


def _connections() -> httpx.Client:
    """Client with reusable connections. The empty TLS context saves loading all root certificates: TLS is not used."""
    return httpx.Client(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


@dataclass(frozen=True)
class NodeClient:
    """Client of a node on this computer."""

    base_url: str
    secret: str = field(repr=False)
    folder: Path  # the node's data folder
    http: httpx.Client = field(default_factory=_connections, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, self.http.close)  # commands do not close their client themselves

    def get(self, path: str) -> dict[str, Any]:
        """Send a GET and return its JSON. Raises NetworkRefusedError if no node answers, or NodeRefusedError."""
        return self._request("GET", path, None, READ_SECONDS)

    def post(
        self, path: str, body: Mapping[str, object] | None = None, seconds: float = COMMAND_SECONDS
    ) -> dict[str, Any]:
        """Send a POST and return its JSON. Raises NetworkRefusedError if no node answers, or NodeRefusedError."""
        return self._request("POST", path, body or {}, seconds)

    def answers(self) -> bool:
        """Whether the node answers a health check within 2 s."""
        try:
            answer = self.http.get(f"{self.base_url}/health", headers=self.headers(), timeout=2)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    def holds_folder(self) -> bool:
        """Whether a live process holds the node's data folder."""
        from neuroshard.config.instance_lock import read_lock_owner

        return read_lock_owner(self.folder) is not None

    def refuse(self, response: httpx.Response) -> NoReturn:
        """Raise NodeRefusedError with the text of an error response."""
        raise _refusal(response)

    def headers(self) -> dict[str, str]:
        """The HTTP headers that authorise a request."""
        return {"Authorization": f"Bearer {self.secret}"}

    def _request(self, method: str, path: str, body: Mapping[str, object] | None, seconds: float) -> dict[str, Any]:
        try:
            response = self.http.request(
                method, self.base_url + path, json=body, headers=self.headers(), timeout=seconds
            )
        except httpx.TransportError as error:
            raise no_node(self.base_url) from error
        if response.is_error:
            self.refuse(response)
        try:
            return cast("dict[str, Any]", response.json())
        except ValueError as error:
            raise NetworkRefusedError(f"The program at {self.base_url} is not a NeuroShard node.") from error


def entrance_of(client: NodeClient) -> Entrance:
    """Make a new way into the dashboard of this node. Raises StorageError."""
    from neuroshard.api.access import new_entrance
    from neuroshard.api.address import for_people

    return new_entrance(client.folder, for_people(client.base_url), time.time())


def no_node(base_url: str) -> NetworkRefusedError:
    """Make the error for an address at which no node answers."""
    return NetworkRefusedError(
        f"No node answers at {base_url}.", "Start one with `neuroshard`, or name its --data-dir or --port."
    )


def _refusal(response: httpx.Response) -> NodeRefusedError:
    """Convert the node's problem document to an error."""
    try:
        problem = cast("dict[str, Any]", response.json())
    except ValueError:
        problem = {}
    detail = problem.get("detail") or problem.get("title") or problem.get("error") or response.reason_phrase
    error = problem.get("error")
    code = cast("dict[str, str | None]", error).get("code") if isinstance(error, dict) else None
    return NodeRefusedError(f"The node refused: {detail}", str(problem.get("action") or ""), code)


def connect(data_dir: Path | None, port: int | None, *, demo: bool = False) -> NodeClient:
    """Make a client of the node that uses this data folder. `port` overrides the port that the node announced.

    Raises NetworkRefusedError if no node is running there, and UsageError if its secret cannot be read.
    """
    from neuroshard.api.address import local_url
    from neuroshard.config.instance_lock import LockOwner, read_lock_owner

    folder = node_folder(data_dir, demo=demo)
    owner = read_lock_owner(folder) or LockOwner(None, None)
    if owner.page_folder:
        folder, demo = Path(owner.page_folder), True
    chosen = port if port is not None else owner.port
    if chosen is None:
        hint = "" if demo else "for a running demo add --demo; or "
        raise NetworkRefusedError(
            f"No node is running with the data folder {folder}.",
            f"Start one with `neuroshard{' demo' if demo else ''}`; {hint}name its --data-dir or --port.",
        )
    return NodeClient(local_url(owner.host, chosen), read_secret(folder, demo=demo), folder)


def read_secret(folder: Path, *, demo: bool = False) -> str:
    """The API secret in a node's data folder. Raises UsageError."""
    from neuroshard.config.folders import NodePaths

    secret_file = NodePaths.below(folder).api_secret
    try:
        return secret_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        hint = "" if demo else " For a demo, add --demo."
        raise UsageError(
            f"Cannot read {secret_file}: {error}.", f"Name the node's folder with --data-dir.{hint}"
        ) from error


FOLLOW_SECONDS = 1.0
MOST_LINES = 2_000  # per response; the node keeps no more
_WAITING = "The node does not answer; waiting for it."


class ReconnectingClient:
    """Client that looks for the node again after it stopped answering: it may come back at another port."""

    def __init__(self, find: Callable[[], NodeClient]) -> None:
        """Connect to a running node. Raises the errors of `find`."""
        self._find = find
        self._client = find()
        self._process = self._current_process()
        self._answers = True
        self.restarts = 0  # restarts of the node that `get` has noticed

    def get(self, path: str) -> dict[str, Any] | None:
        """Send a GET and return its JSON; None while no node answers. It counts restarts of the node's process."""
        from neuroshard.errors import NeuroShardError

        try:
            if not self._answers:
                self._client = self._find()
                process = self._current_process()
                self.restarts += process != self._process
                self._process = process
            answer = self._client.get(path)
        except NeuroShardError:  # starting, stopping, gone, or with another secret than before
            self._answers = False
            return None
        self._answers = True
        return answer

    def _current_process(self) -> int | None:
        from neuroshard.config.instance_lock import read_lock_owner

        owner = read_lock_owner(self._client.folder)
        return None if owner is None else owner.pid


def log_records(node: ReconnectingClient, sleep: Callable[[float], None] = time.sleep) -> Iterator[Mapping[str, Any]]:
    """Yield every log record once, without end. After a restart of the node it starts at the node's first record."""
    after, restarts, is_reported = 0, 0, False
    while True:
        answer = node.get(f"/api/logs?after={after}&limit={MOST_LINES}")
        if answer is None:
            if not is_reported:
                sys.stderr.write(f"{_WAITING}\n")
            is_reported = True
            sleep(FOLLOW_SECONDS)
            continue
        is_reported = False
        # A restarted node numbers its records from 1: this answer was asked with the old process's number. Ask again.
        if node.restarts != restarts or answer["last_sequence"] < after:
            after, restarts = 0, node.restarts
            continue
        for record in answer["records"]:
            after = record["sequence"]
            yield record
        sleep(FOLLOW_SECONDS)


def watch(node: ReconnectingClient, lines_of: Callable[[Mapping[str, Any]], list[str]]) -> None:
    """Show the status in place until Ctrl+C. While the node does not answer, the last status stays."""
    from rich.console import Console
    from rich.live import Live

    seen: list[str] = []
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            answer = node.get("/api/status")
            if answer is not None:
                seen = lines_of(answer)
            live.update(shown(seen, answers=answer is not None), refresh=True)
            time.sleep(FOLLOW_SECONDS)


def shown(lines: list[str], *, answers: bool) -> RenderableType:
    """Render one row per line, cut at the terminal's width, below a notice if the node does not answer."""
    from rich.console import Group
    from rich.text import Text

    text = Text("\n".join(lines), style="" if answers else "dim", no_wrap=True, overflow="ellipsis")
    return text if answers else Group(Text(_WAITING, style="bold red"), text)
