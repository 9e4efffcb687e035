"""Requests from peers: the kinds a node answers, their limits and handlers.

Every transport answers through this server.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

import anyio
from msgspec import Meta, Struct

from neuroshard.messages import Frame, FrameLimits, WireError
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.network.transport import (
    MAX_REASON_CHARACTERS,
    Admission,
    PeerRefusedError,
    RequestHandler,
    RequestRefusedError,
)
from neuroshard.types import NodeId

REFUSED_KIND = "refused"
MAX_WAITING_PER_SLOT = 4  # waiting requests of a kind per concurrent one
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
    for_anyone: bool


class RequestServer:
    """The request handlers of one node, behind its membership gate."""

    def __init__(self, gate: MembershipGate | None = None) -> None:
        """Without `gate` every peer is served."""
        self._served: dict[str, _Served] = {}
        self._gate = gate or MembershipGate()

    def serve(
        self,
        kind: str,
        handler: RequestHandler,
        limits: FrameLimits,
        max_concurrent: int,
        *,
        admit: Admission | None = None,
        for_anyone: bool = False,
    ) -> None:
        """Register the handler of a kind. Raises ValueError if the kind has a handler already.

        The gate must let a peer in, as a member or as a reader, unless the kind is `for_anyone`.
        """
        if kind in self._served or kind == REFUSED_KIND:
            raise ValueError(f"requests of kind {kind!r} already have a handler")
        self._served[kind] = _Served(handler, limits, anyio.CapacityLimiter(max_concurrent), admit, for_anyone)

    def limits_of(self, kind: str) -> FrameLimits:
        """Limits of a request of this kind. Raises RequestRefusedError for a kind without a handler."""
        served = self._served.get(kind)
        if served is None:
            raise RequestRefusedError(f"This node does not answer requests of kind {kind[:64]!r}.")
        return served.limits

    def check(self, sender: NodeId, kind: str, body_bytes: int) -> None:
        """Check a peer's request before its tensors are received. Raises RequestRefusedError."""
        served = self._served.get(kind)
        if served is None:
            return
        peer_check = None if served.for_anyone else self._gate.peer_check
        if peer_check is not None and (reason := peer_check(sender)) and not self._gate.may_read(sender, kind):
            raise RequestRefusedError(reason)
        if served.admit is not None:
            served.admit(body_bytes)

    async def answer(self, sender: NodeId, request: Frame) -> Frame:
        """The handler's answer, or a frame with the reason why there is none.

        Never raises because of a peer's input.
        """
        try:
            self.limits_of(request.kind)  # refuses a kind without a handler
            served = self._served[request.kind]
            if served.slots.statistics().tasks_waiting >= MAX_WAITING_PER_SLOT * served.slots.total_tokens:
                return refusal("This node is busy; try again later.")
            async with served.slots:
                return await served.handler(sender, request)
        except (RequestRefusedError, WireError) as error:
            return refusal(str(error))
        except Exception:  # noqa: BLE001 - the inbound-message handler: a defect in one must not end the node
            _LOG.exception("A request of kind %s from %s failed.", request.kind, sender)
            return refusal("internal error")


def refusal(reason: str) -> Frame:
    """The answer that refuses."""
    return Frame(REFUSED_KIND, Refused(reason[:MAX_REASON_CHARACTERS]))


def accepted(peer: NodeId, answer: Frame) -> Frame:
    """A peer's answer, unless it is a refusal. Raises PeerRefusedError with the peer's reason."""
    if answer.kind != REFUSED_KIND:
        return answer
    raise PeerRefusedError(f"Peer {peer} refused: {answer.read(Refused).reason}")
