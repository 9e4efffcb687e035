"""Two home networks behind routers that translate addresses, and an internet between them: namespaces and TUN devices.

The routers keep one outside port for each inside port (endpoint-independent mapping) and let in only whom the inside
has called before (address- and port-dependent filtering), as most do. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path

TUN = Path("/dev/net/tun")
RELAY_IP = "203.0.113.1"
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_CLONE_NEWNET = 0x40000000
_Flow = tuple[int, int]  # address and port


def is_possible() -> bool:
    """Whether this machine lets tests make networks."""
    if os.name != "posix" or os.geteuid() != 0 or not TUN.exists() or shutil.which("ip") is None:
        return False
    return subprocess.run(["ip", "netns"], capture_output=True, check=False).returncode == 0


def enter(namespace: str) -> None:
    """Move this thread into a network namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


@dataclass
class Router:
    """Translates between one inside address and one outside address."""

    inside: int
    outside: int
    lets_everybody_in: bool = False
    called: set[tuple[int, _Flow]] = field(default_factory=set)  # inside port, outside flow
    dropped: int = 0

    def outwards(self, packet: bytearray) -> bool:
        source, target = flows(packet)
        if source[0] != self.inside:
            return False
        self.called.add((source[1], target))
        rewrite(packet, 12, self.outside)
        return True

    def inwards(self, packet: bytearray) -> bool:
        source, target = flows(packet)
        if not self.lets_everybody_in and (target[1], source) not in self.called:
            self.dropped += 1
            return False
        rewrite(packet, 16, self.inside)
        return True


def flows(packet: bytearray) -> tuple[_Flow, _Flow]:
    source, target = struct.unpack_from("!II", packet, 12)
    ports = struct.unpack_from("!HH", packet, 20)
    return (source, ports[0]), (target, ports[1])


def rewrite(packet: bytearray, position: int, address: int) -> None:
    """Change an address; both checksums follow (RFC 1624)."""
    old = packet[position : position + 4]
    new = address.to_bytes(4, "big")
    packet[position : position + 4] = new
    for checksum in (10, 36):  # of IP and of TCP
        total = ~int.from_bytes(packet[checksum : checksum + 2], "big") & 0xFFFF
        for start in (0, 2):
            total += (~int.from_bytes(old[start : start + 2], "big") & 0xFFFF) + int.from_bytes(
                new[start : start + 2], "big"
            )
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        packet[checksum : checksum + 2] = (~total & 0xFFFF).to_bytes(2, "big")


@dataclass
class Internet:
    """The namespaces "relay", "left" and "right" of one test."""

    prefix: str
    routers: dict[str, Router]

    def name(self, place: str) -> str:
        return f"{self.prefix}-{place}"

    def run_in(self, place: str, work: Callable[[], None]) -> threading.Thread:
        """A thread whose sockets are in that place."""

        def body() -> None:
            enter(self.name(place))
            work()

        thread = threading.Thread(target=body, name=place)
        thread.start()
        return thread


@contextmanager
def internet(prefix: str = "nsnat") -> Iterator[Internet]:
    """A relay at RELAY_IP and two home networks, 10.0.1.2 and 10.0.2.2."""
    places = {"relay": f"{RELAY_IP}/24", "left": "10.0.1.2/24", "right": "10.0.2.2/24"}
    routers = {
        "left": Router(int(IPv4Address("10.0.1.2")), int(IPv4Address("203.0.113.10"))),
        "right": Router(int(IPv4Address("10.0.2.2")), int(IPv4Address("203.0.113.20"))),
    }
    devices: dict[str, int] = {}
    stop, stopped = os.pipe()
    made = Internet(prefix, routers)
    try:
        for place, address in places.items():
            _ip("netns", "add", made.name(place))
            devices[place] = _device(made.name(place), address, is_default=place != "relay")
        thread = threading.Thread(target=_carry, args=(devices, routers, stop), name="routers")
        thread.start()
        try:
            yield made
        finally:
            os.write(stopped, b"x")
            thread.join()
    finally:
        for descriptor in (*devices.values(), stop, stopped):
            os.close(descriptor)
        for place in places:
            subprocess.run(["ip", "netns", "del", made.name(place)], capture_output=True, check=False)


def _device(namespace: str, address: str, *, is_default: bool) -> int:
    """A TUN device in a namespace; what the namespace sends can be read from it."""
    descriptors: list[int] = []

    def make() -> None:
        enter(namespace)
        descriptor = os.open(TUN, os.O_RDWR)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH14x", b"wan", _IFF_TUN_NO_PI))
        descriptors.append(descriptor)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    for command in (["link", "set", "lo", "up"], ["addr", "add", address, "dev", "wan"], ["link", "set", "wan", "up"]):
        _ip("-n", namespace, *command)
    if is_default:
        _ip("-n", namespace, "route", "add", "default", "dev", "wan")
    return descriptors[0]


def _carry(devices: dict[str, int], routers: dict[str, Router], stop: int) -> None:
    by_outside = {router.outside: place for place, router in routers.items()}
    while True:
        ready, _, _ = select.select([*devices.values(), stop], [], [])
        if stop in ready:
            return
        for place, descriptor in devices.items():
            if descriptor in ready:
                _forward(place, bytearray(os.read(descriptor, 65_536)), devices, routers, by_outside)


def _forward(
    place: str, packet: bytearray, devices: dict[str, int], routers: dict[str, Router], by_outside: dict[int, str]
) -> None:
    if packet[0] != 0x45 or packet[9] != 6:  # plain IPv4 and TCP only
        return
    if place in routers and not routers[place].outwards(packet):
        return
    target = flows(packet)[1][0]
    if target == int(IPv4Address(RELAY_IP)):
        os.write(devices["relay"], packet)
    elif (home := by_outside.get(target)) is not None and routers[home].inwards(packet):
        os.write(devices[home], packet)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
