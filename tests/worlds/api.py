"""An application around a fake node, called without a socket, and the events of its streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from fastapi import FastAPI

from neuroshard.api.app import ApiContext, ApiLimits, create_app
from neuroshard.telemetry.logs import LogRing
from neuroshard.types import JsonValue
from tests.worlds.fake_node import FakeNode

SECRET = "a-secret-of-the-tests-that-is-long-enough"
PORT = 8000
BODIES: dict[tuple[str, str], object] = {
    ("post", "/api/session"): {"secret": SECRET},
    ("post", "/v1/completions"): {"prompt": "once upon a time", "max_tokens": 4},
    ("patch", "/api/config"): {"memory": 900},
    ("post", "/api/training/pause"): {"duration_seconds": 5},
}


@dataclass
class Api:
    """One application, its node and ways to call it."""

    node: FakeNode
    context: ApiContext
    app: FastAPI

    @property
    def secret(self) -> dict[str, str]:
        """Headers of the owner."""
        return {"Authorization": f"Bearer {self.context.secret}"}

    @property
    def base_url(self) -> str:
        """Where the application is."""
        return f"http://127.0.0.1:{self.context.port}"

    def call(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        json: object = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        """One request without a socket."""

        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=self.base_url) as client:
                raw = {name: value.encode("latin-1") for name, value in (headers or {}).items()}
                return await client.request(method, path, headers=raw, json=json, content=content)

        return anyio.run(request)

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        """GET."""
        return self.call("GET", path, headers=headers)

    def command(self, method: str, path: str, json: object = None) -> httpx.Response:
        """A call of the owner."""
        return self.call(method, path, headers=self.secret, json=json)


def config_view() -> JsonValue:
    """What the composition root shows."""
    return {"settings": {"port": PORT, "broken": float("nan")}, "sources": {"port": "default"}}


def make_api(
    node: FakeNode,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    limits: ApiLimits | None = None,
    clock: Callable[[], float] = lambda: 1_061.0,
) -> Api:
    """An application for a node."""
    context = ApiContext(
        board=node.board,
        commands=node.commands,
        log_ring=LogRing(capacity=1_000),
        secret=SECRET,
        config_view=config_view,
        host=host,
        port=port,
        limits=limits if limits is not None else ApiLimits(),
        clock=clock,
    )
    return Api(node, context, create_app(context))


def parse(block: str) -> tuple[str, Any]:
    """Name and data of one event."""
    fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
    return fields.get("event", ""), json.loads(fields.get("data", "null"))


def events_of(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Events of a live stream."""
    buffer = ""
    for text in response.iter_text():
        buffer += text
        while "\n\n" in buffer:
            block, _, buffer = buffer.partition("\n\n")
            event = parse(block)
            if event[0]:
                yield event
