"""Talks to the running node over its own REST API, with the secret from the data folder."""

from __future__ import annotations

import ssl
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import httpx

from neuroshard.cli.options import node_folder
from neuroshard.errors import NetworkRefusedError, NeuroShardError, UsageError

READ_SECONDS = 30.0
COMMAND_SECONDS = 70.0  # the node itself gives up on a command after at most 60


class RequestRefusedError(NeuroShardError):
    """The node answered, but not as hoped."""


def _connections() -> httpx.Client:
    """Connections that are used again. Nothing goes over TLS: without this every command would read all roots."""
    return httpx.Client(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


@dataclass(frozen=True)
class NodeClient:
    """A node on this computer."""

    base_url: str
    secret: str = field(repr=False)
    folder: Path  # its data folder
    http: httpx.Client = field(default_factory=_connections, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, self.http.close)  # a command has no other moment at which it needs its node no more

    def get(self, path: str) -> dict[str, Any]:
        """JSON body of a GET. Raises NetworkRefusedError when no node answers."""
        return self._request("GET", path, None, READ_SECONDS)

    def post(
        self, path: str, body: Mapping[str, object] | None = None, seconds: float = COMMAND_SECONDS
    ) -> dict[str, Any]:
        """JSON body of a POST. Raises RequestRefusedError with the node's own explanation."""
        return self._request("POST", path, body or {}, seconds)

    def answers(self) -> bool:
        """Whether the node is up."""
        try:
            answer = self.http.get(f"{self.base_url}/health", headers=self.headers(), timeout=2)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    def holds_folder(self) -> bool:
        """Whether a live process holds its data folder."""
        from neuroshard.training.checkpoint.lock import read_lock_owner

        return read_lock_owner(self.folder) is not None

    def refuse(self, response: httpx.Response) -> NoReturn:
        """Raise what an error response says. Raises RequestRefusedError always."""
        raise _refusal(response)

    def headers(self) -> dict[str, str]:
        """What authorises a call."""
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
            raise NetworkRefusedError(f"What answers at {self.base_url} is no NeuroShard node.") from error


def no_node(base_url: str) -> NetworkRefusedError:
    """The error of a node that is not there."""
    return NetworkRefusedError(
        f"No node answers at {base_url}.", "Start one with `neuroshard`, or name its --data-dir or --port."
    )


def _refusal(response: httpx.Response) -> RequestRefusedError:
    """The node's problem document as an error."""
    try:
        problem = cast("dict[str, Any]", response.json())
    except ValueError:
        problem = {}
    detail = problem.get("detail") or problem.get("title") or problem.get("error") or response.reason_phrase
    return RequestRefusedError(f"The node refused: {detail}", str(problem.get("action") or ""))


def connect(data_dir: Path | None, port: int | None, *, demo: bool = False) -> NodeClient:
    """Client of the node that uses this data folder.

    Raises NetworkRefusedError when none is running there, UsageError when its secret cannot be read.
    """
    from neuroshard.api.hosts import local_url
    from neuroshard.config.data_dir import NodePaths
    from neuroshard.training.checkpoint.lock import LockOwner, read_lock_owner

    folder = node_folder(data_dir, demo=demo)
    owner = read_lock_owner(folder) or LockOwner(None, None)
    chosen = port if port is not None else owner.port
    if chosen is None:
        hint = "" if demo else "for a running demo add --demo; or "
        raise NetworkRefusedError(
            f"No node is running with the data folder {folder}.",
            f"Start one with `neuroshard{' demo' if demo else ''}`; {hint}name its --data-dir or --port.",
        )
    secret_file = NodePaths.below(folder).api_secret
    try:
        secret = secret_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {secret_file}: {error}.", "Name the node's folder with --data-dir.") from error
    return NodeClient(local_url(owner.host, chosen), secret, folder)
