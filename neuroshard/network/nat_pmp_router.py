"""A home router that opens ports when asked by NAT-PMP (RFC 6886).

What a gateway tells everybody by multicast when it changes is not listened to: whoever holds a lease asks now and then.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Final, TypeVar

import anyio
import trio

from neuroshard.network.gateway import default_gateway
from neuroshard.network.nat_pmp import (
    MAX_PACKET_BYTES,
    PORT,
    ExternalHost,
    Mapping,
    Reader,
    Refusal,
    SeenEpoch,
    external_host_question,
    mapping_question,
    read_external_host,
    read_mapping,
)
from neuroshard.network.routers import Lease, NoRouterError, RouterRefusedError

WAITS_SECONDS: Final = (0.25, 0.5, 1.0, 2.0)  # for an answer, before it is asked again: section 3.1, fewer times
CLOSING_WAITS_SECONDS: Final = WAITS_SECONDS[:2]  # whoever stops is not kept
_Answer = TypeVar("_Answer", ExternalHost, Mapping)


class NatPmpRouter:
    """The gateway at one address. One question at a time; only packets from that address and port are read."""

    def __init__(self, gateway: str, *, port: int = PORT, waits: Sequence[float] = WAITS_SECONDS) -> None:
        self._endpoint = (gateway, port)
        self._waits = tuple(waits)
        self._turn = anyio.Lock()
        self._seen: SeenEpoch | None = None
        self._restarts = 0
        self._opened_after: dict[int, int] = {}  # how many restarts, by inner port
        self._local_host = ""

    @property
    def local_host(self) -> str:
        """This computer's address as the router sees it; empty before the first question."""
        return self._local_host

    async def external_host(self) -> str:
        """The router's own address outside. Raises RouterRefusedError."""
        return (await self._ask(external_host_question(), read_external_host)).host

    async def open(self, inner: int, wish: int, seconds: int) -> Lease:
        """Pass a port on to this computer. Raises RouterRefusedError, also for an answer that makes no sense."""
        told = await self._ask(mapping_question(inner, wish, seconds), partial(read_mapping, inner=inner))
        lease = told.lease()
        self._opened_after[inner] = self._restarts
        return lease

    async def keeps(self, lease: Lease) -> bool:
        """Whether the router has not begun anew since, by its last answer."""
        await anyio.lowlevel.checkpoint()
        return self._opened_after.get(lease.inner) == self._restarts

    async def close(self, lease: Lease) -> None:
        """Give a port back. Raises RouterRefusedError."""
        read = partial(read_mapping, inner=lease.inner)
        await self._ask(mapping_question(lease.inner, 0, 0), read, self._waits[: len(CLOSING_WAITS_SECONDS)])
        self._opened_after.pop(lease.inner, None)

    async def _ask(self, question: bytes, read: Reader[_Answer], waits: Sequence[float] | None = None) -> _Answer:
        async with self._turn:
            try:
                answer = await self._answer(question, read, waits or self._waits)
            except OSError as error:  # also when the gateway says that nobody listens there
                raise NoRouterError(f"No router answers by NAT-PMP: {error.strerror or error}.") from error
        if answer is None:
            raise NoRouterError("No router answers by NAT-PMP.")
        self._note(answer.epoch)
        if isinstance(answer, Refusal):
            raise answer.error()
        return answer

    async def _answer(self, question: bytes, read: Reader[_Answer], waits: Sequence[float]) -> _Answer | Refusal | None:
        """The first packet that is an answer; None when none came in time. Raises OSError."""
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            await sock.connect(self._endpoint)  # the system drops what others send
            self._local_host = str(sock.getsockname()[0])
            for seconds in waits:
                await sock.send(question)
                with anyio.move_on_after(seconds):
                    while True:
                        answer = read(await sock.recv(MAX_PACKET_BYTES))
                        if answer is not None:
                            return answer
        return None

    def _note(self, epoch: int) -> None:
        now = anyio.current_time()
        if self._seen is not None and self._seen.has_restarted(epoch, now):
            self._restarts += 1
        self._seen = SeenEpoch(epoch, now)


async def find_nat_pmp_router() -> NatPmpRouter:
    """The router towards the internet, when it answers. Raises RouterRefusedError."""
    gateway = default_gateway()
    if gateway is None:
        raise NoRouterError("No router leads to the internet.")
    router = NatPmpRouter(gateway)
    try:
        await router.external_host()
    except NoRouterError:
        raise
    except RouterRefusedError as error:
        raise NoRouterError(f"By NAT-PMP: {error}") from error
    return router
