"""Requests from peers: which kinds are answered, within which limits, by whom. Every transport answers through it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

import anyio
from msgspec import Meta, Struct

from neuroshard.messages import Frame, FrameLimits, WireError
from neuroshard.network.transport import (
    MAX_REASON_CHARACTERS,
    Admission,
    PeerRefusedError,
    RequestHandler,
    RequestRefusedError,
)
from neuroshard.types import NodeId

REFUSED_KIND = "refused"
MAX_WAITING_PER_SLOT = 4  # requests of a kind that may wait for each one that is answered
_LOG = logging.getLogger(__name__)


class Refused(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a request that is refused."""

    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]


REFUSED_LIMITS = FrameLimits(message=Refused)


@dataclass(frozen=True)
class _Served:
    handler: RequestHandler
    limits: FrameLimits
    slots: anyio.CapacityLimiter
    admit: Admission | None


class RequestServer:
    """The handlers of one node."""

    def __init__(self) -> None:
        self._served: dict[str, _Served] = {}

    def serve(
        self,
        kind: str,
        handler: RequestHandler,
        limits: FrameLimits,
        max_concurrent: int,
        *,
        admit: Admission | None = None,
    ) -> None:
        """Answer a kind. Raises ValueError when it has a handler already."""
        if kind in self._served or kind == REFUSED_KIND:
            raise ValueError(f"requests of kind {kind!r} are answered already")
        self._served[kind] = _Served(handler, limits, anyio.CapacityLimiter(max_concurrent), admit)

    def limits_of(self, kind: str) -> FrameLimits:
        """What a request of this kind may hold. Raises RequestRefusedError for a kind that nobody answers."""
        served = self._served.get(kind)
        if served is None:
            raise RequestRefusedError(f"This node does not answer requests of kind {kind[:64]!r}.")
        return served.limits

    def check(self, kind: str, body_bytes: int) -> None:
        """Look at a peer's request before its tensors are received. Raises RequestRefusedError."""
        served = self._served.get(kind)
        if served is not None and served.admit is not None:
            served.admit(body_bytes)

    async def answer(self, sender: NodeId, request: Frame) -> Frame:
        """The handler's answer, or a frame that says why there is none; never raises for what a peer did."""
        try:
            return await self._handled(sender, request)
        except (RequestRefusedError, WireError) as error:
            return refusal(str(error))
        except Exception:  # noqa: BLE001 - the inbound-message handler: a defect in one must not end the node
            _LOG.exception("A request of kind %s from %s failed.", request.kind, sender)
            return refusal("internal error")

    async def _handled(self, sender: NodeId, request: Frame) -> Frame:
        self.limits_of(request.kind)
        served = self._served[request.kind]
        if served.slots.statistics().tasks_waiting >= MAX_WAITING_PER_SLOT * served.slots.total_tokens:
            raise RequestRefusedError("This node is busy; try again later.")
        async with served.slots:
            return await served.handler(sender, request)


def refusal(reason: str) -> Frame:
    """The answer that refuses."""
    return Frame(REFUSED_KIND, Refused(reason[:MAX_REASON_CHARACTERS]))


def accepted(peer: NodeId, answer: Frame) -> Frame:
    """The answer of a peer, unless it refuses. Raises PeerRefusedError with the peer's reason."""
    if answer.kind != REFUSED_KIND:
        return answer
    raise PeerRefusedError(f"Peer {peer} refused: {answer.read(Refused).reason}")
