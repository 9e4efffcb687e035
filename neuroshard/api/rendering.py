"""Answers as bytes, made once for each version of the snapshot however many ask."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response

from neuroshard.api.bodies.base import Answer
from neuroshard.status.board import StatusBoard
from neuroshard.status.snapshot import NodeStatus

JSON = "application/json"
View = Callable[[NodeStatus], Answer]


class RenderedViews:
    """Bytes of views of the newest snapshot; used by one event loop only."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._version = 0
        self._bytes: dict[View, bytes] = {}
        self.rendered = 0  # how often a view was really serialised

    def get(self, view: View) -> bytes:
        """JSON of the view of the newest snapshot."""
        version, status = self._board.versioned()
        if version != self._version:
            self._version = version
            self._bytes.clear()
        if view not in self._bytes:
            self.rendered += 1
            self._bytes[view] = view(status).model_dump_json().encode()
        return self._bytes[view]

    def respond(self, view: View) -> Response:
        """The view as an answer."""
        return Response(self.get(view), media_type=JSON)
