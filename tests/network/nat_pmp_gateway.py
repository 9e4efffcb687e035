"""A gateway that speaks NAT-PMP, for tests: what it knows, and what of RFC 6886 it breaks when told to."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class NatPmpBox:
    """Answers packets; `questions` says what it was asked: ("host",), ("open", inner, wish, seconds)."""

    outside: str = "1.2.3.4"
    result: int = 0
    longest: int = 7200
    taken: set[int] = field(default_factory=set[int])  # outer ports of other computers
    opened: dict[int, int] = field(default_factory=dict[int, int])  # outer by inner
    questions: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])
    clock: Callable[[], float] = time.monotonic
    began: float | None = None

    def restart(self) -> None:
        """Lose the table, as in a power cut."""
        self.opened.clear()
        self.began = self.clock()

    def answer(self, packet: bytes) -> bytes | None:
        """What goes back to whoever sent a packet."""
        if self.began is None:
            self.began = self.clock()
        epoch = int(self.clock() - self.began)
        if packet == b"\0\0":
            self.questions.append(("host",))
            return struct.pack("!BBHI4s", 0, 128, self.result, epoch, socket.inet_aton(self.outside))
        if len(packet) != 12 or packet[:4] != b"\0\2\0\0":
            return None
        inner, wish, seconds = struct.unpack("!HHI", packet[4:])
        self.questions.append(("open", inner, wish, seconds) if seconds else ("close", inner))
        outer = 0 if self.result else self._outer(inner, wish, seconds)
        return struct.pack("!BBHIHHI", 0, 130, self.result, epoch, inner, outer, min(seconds, self.longest))

    def _outer(self, inner: int, wish: int, seconds: int) -> int:
        if not seconds:
            self.opened.pop(inner, None)
            return 0
        outer = wish
        while outer in self.taken:
            outer += 1
        self.opened[inner] = outer
        return outer
