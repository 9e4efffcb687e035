"""Computers on local networks, the routers between them, and a network that has nothing but addresses.

Real: the network stacks. A computer is a network namespace of the kernel, which is gone after the test. Simulated: the
routers and the internet between them. Home routers keep one outside port for each inside port (endpoint-independent
mapping) and let in only peers that the inside has called before (address- and port-dependent filtering), and every
caller of a port that the inside asked for by NAT-PMP. Namespaces need root, and `internet` needs /dev/net/tun as well.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from pathlib import Path
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import Any, Self, cast

import pytest
from trio._core import _thread_cache as cache

from neuroshard.network import Network
from neuroshard.types import NodeId

ROOT = Path(__file__).parents[2]
LAN_PROGRAMS = Path(__file__).with_name("lan_programs.py")
NEAR, FAR = "10.77.0.1", "10.77.0.2"  # the two computers' addresses


def why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "network namespaces need Linux and its `ip` command"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"neuro-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Program:
    """A Python program inside a namespace; it ends when its standard input does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: Queue[str | None] = Queue()  # None: it ended
        self._reader = Thread(target=self._read)
        self._reader.start()

    def line(self, seconds: float = 40.0) -> str:
        """The next line it prints. Raises Empty when there is none in time, EOFError when it ended."""
        line = self._lines.get(timeout=seconds)
        if line is None:
            raise EOFError(f"ended with code {self.process.wait(10)}")
        return line

    def end(self, seconds: float = 20.0) -> list[str]:
        """End it well; the lines that it had still to say."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(seconds) == 0
        return list(iter(self._lines.get, None))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@dataclass(frozen=True)
class Computer:
    """A namespace."""

    name: str

    def run(self, *command: str) -> str:
        """Run a command inside; what it printed."""
        return subprocess.run(
            ["ip", "netns", "exec", self.name, *command], check=True, capture_output=True, text=True
        ).stdout

    def start(self, program: Path, *arguments: object) -> Program:
        """Start a Python program inside. It sees no settings of NeuroShard."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
        environment["PYTHONPATH"] = str(ROOT)
        environment["PYTHONUNBUFFERED"] = "1"
        return Program(
            subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, str(program), *map(str, arguments)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def packets_sent(self) -> int:
        """How many packets ever left through its only interface."""
        return int(self.run("cat", "/sys/class/net/lan/statistics/tx_packets"))


@contextmanager
def local_network() -> Iterator[tuple[Computer, Computer]]:
    """Computers with the addresses NEAR and FAR, joined by a cable. Skips the test where none can be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    computers = (Computer(f"neuro-near-{os.getpid()}"), Computer(f"neuro-far-{os.getpid()}"))
    made: list[Computer] = []
    try:
        for computer in computers:
            _ip("netns", "add", computer.name)
            made.append(computer)
            computer.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1")
        one, other = computers
        _ip("link", "add", "lan", "netns", one.name, "type", "veth", "peer", "name", "lan", "netns", other.name)
        for computer, host in ((one, NEAR), (other, FAR)):
            computer.run("ip", "address", "add", f"{host}/24", "dev", "lan")
            for interface in ("lo", "lan"):
                computer.run("ip", "link", "set", interface, "up")
        yield computers
    finally:
        for computer in made:
            _ip("netns", "delete", computer.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class NatPmpBox:
    """Answers packets; `questions` says what it was asked: ("host",), ("open", inner, suggested_port, seconds)."""

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
        inner, suggested_port, seconds = struct.unpack("!HHI", packet[4:])
        self.questions.append(("open", inner, suggested_port, seconds) if seconds else ("close", inner))
        outer = 0 if self.result else self._outer(inner, suggested_port, seconds)
        return struct.pack("!BBHIHHI", 0, 130, self.result, epoch, inner, outer, min(seconds, self.longest))

    def _outer(self, inner: int, suggested_port: int, seconds: int) -> int:
        if not seconds:
            self.opened.pop(inner, None)
            return 0
        outer = suggested_port
        while outer in self.taken:
            outer += 1
        self.opened[inner] = outer
        return outer


@dataclass
class AddressesOnly:
    """A transport of a node that listens somewhere and does nothing."""

    local_id: NodeId
    told: tuple[str, ...]

    def addresses(self) -> tuple[str, ...]:
        return self.told

    def peers(self) -> frozenset[NodeId]:
        return frozenset()


def network_at(node_id: NodeId, *addresses: str) -> Network:
    """A network whose node is dialled at these multiaddrs."""
    nothing = cast("Any", None)
    return Network(cast("Any", AddressesOnly(node_id, addresses)), nothing, nothing)


def move(network: Network, *addresses: str) -> None:
    """From now on the node is dialled elsewhere."""
    cast("Any", network.transport).told = addresses


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
    gateway: int = 0  # its own address inside
    speaks_nat_pmp: bool = False
    lets_everybody_in: bool = False  # a full cone
    is_symmetric: bool = False  # another outside port for each target
    needs_a_beginning: bool = False  # after a reboot it does not know connections that it did not see begin
    forwards: dict[int, int] = field(default_factory=dict)  # inside port by outside port
    forwarded: dict[tuple[int, _Flow], int] = field(default_factory=dict)  # outside port by inside port and caller
    called: set[tuple[int, _Flow]] = field(default_factory=set)  # inside port, outside flow
    ports: Iterator[int] = field(default_factory=lambda: iter(range(20_000, 60_000)))  # of a symmetric router
    dropped: int = 0

    def reboot(self) -> None:
        """Lose all tables."""
        self.forwards.clear()
        self.forwarded.clear()
        self.called.clear()

    def outwards(self, packet: bytearray) -> bool:
        source, target = flows(packet)
        if source[0] != self.inside:
            return False
        if self.needs_a_beginning and (source[1], target) not in self.called and not is_beginning(packet):
            self.dropped += 1
            return False
        outer = self.forwarded.get((source[1], target))
        if outer is None and self.is_symmetric:
            outer = self.forwarded[source[1], target] = next(self.ports)
            self.forwards[outer] = source[1]
        self.called.add((source[1], target))
        if outer is not None:
            rewrite(packet, 20, outer, 2)
        rewrite(packet, 12, self.outside)
        return True

    def inwards(self, packet: bytearray) -> bool:
        source, target = flows(packet)
        inner = self.forwards.get(target[1])
        if self.is_symmetric and (inner is None or self.forwarded.get((inner, source)) != target[1]):
            self.dropped += 1
            return False
        if inner is not None:
            self.forwarded[inner, source] = target[1]
            rewrite(packet, 22, inner, 2)
        elif not self.lets_everybody_in and (target[1], source) not in self.called:
            self.dropped += 1
            return False
        rewrite(packet, 16, self.inside)
        return True

    def answer(self, question: bytes) -> bytes:
        """NAT-PMP: every port that is asked for is had, 1,000 above its own number."""
        if question[1] == 0:
            return struct.pack("!BBHII", 0, 128, 0, 60, self.outside)
        inner, _, seconds = struct.unpack("!4xHHI", question)
        if seconds:
            self.forwards[inner + 1000] = inner
        else:
            del self.forwards[inner + 1000]
        return struct.pack("!BBHIHHI", 0, 130, 0, 60, inner, inner + 1000 if seconds else 0, seconds)


def is_beginning(packet: bytearray) -> bool:
    """Whether it is the first packet of a TCP connection."""
    return packet[33] & 0x12 == 0x02


def flows(packet: bytearray) -> tuple[_Flow, _Flow]:
    source, target = struct.unpack_from("!II", packet, 12)
    ports = struct.unpack_from("!HH", packet, 20)
    return (source, ports[0]), (target, ports[1])


def rewrite(packet: bytearray, position: int, value: int, size: int = 4) -> None:
    """Change an address, or a port of two bytes; the checksums follow (RFC 1624)."""
    old = packet[position : position + size]
    new = value.to_bytes(size, "big")
    packet[position : position + size] = new
    for checksum in (10, 36) if size == 4 else (36,):  # of IP and of TCP
        total = ~int.from_bytes(packet[checksum : checksum + 2], "big") & 0xFFFF
        for start in range(0, size, 2):
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
    relay: str  # its address
    routers: dict[str, Router]

    def name(self, place: str) -> str:
        return f"{self.prefix}-{os.getpid()}-{place}"  # tests in other processes have theirs

    def run_in(self, place: str, work: Callable[[], None]) -> threading.Thread:
        """A thread whose sockets are in that place."""

        def body() -> None:
            enter(self.name(place))
            work()

        thread = threading.Thread(target=body, name=place)
        thread.start()
        return thread


@contextmanager
def short_lived_workers() -> Iterator[None]:
    """trio keeps its worker threads for 10 s, and they stay in the place where they were started.

    The next test in this process would use them, and dial or start programs in a place that is gone.
    """
    kept, cache.IDLE_TIMEOUT = cache.IDLE_TIMEOUT, 0.05
    try:
        yield
        here = Path("/proc/thread-self/ns/net").readlink()
        while any(_place_of(thread) not in {here, None} for thread in threading.enumerate()):
            time.sleep(0.05)
    finally:
        cache.IDLE_TIMEOUT = kept


def _place_of(thread: threading.Thread) -> Path | None:
    """The network namespace of a trio worker thread; None for another thread, or one that ended."""
    if not thread.name.startswith("Trio thread"):
        return None
    try:
        return Path(f"/proc/self/task/{thread.native_id}/ns/net").readlink()
    except OSError:
        return None


@contextmanager
def internet(prefix: str = "nsnat", network: str = "203.0.113", public: Sequence[str] = ()) -> Iterator[Internet]:
    """A relay at `network`.1 (RELAY_IP) and two homes, 10.0.1.2 and 10.0.2.2, behind `network`.10 and .20.

    Homes in `public` have these addresses themselves.
    """
    relay = f"{network}.1"
    places = {"relay": f"{relay}/24", "left": "10.0.1.2/24", "right": "10.0.2.2/24"}
    routers = {
        home: Router(*(int(IPv4Address(text)) for text in (f"10.0.{n}.2", f"{network}.{n}0", f"10.0.{n}.1")))
        for n, home in enumerate(("left", "right"), 1)
    }
    for home in public:
        router = routers[home] = replace(routers[home], inside=routers[home].outside, gateway=0, lets_everybody_in=True)
        places[home] = f"{IPv4Address(router.inside)}/24"
    devices: dict[str, int] = {}
    stop, stopped = os.pipe()
    made = Internet(prefix, relay, routers)
    try:
        for place, address in places.items():
            _ip("netns", "add", made.name(place))
            gateway = routers[place].gateway or None if place in routers else None
            devices[place] = _device(made.name(place), address, gateway)
        thread = threading.Thread(target=_carry, args=(devices, made, stop), name="routers")
        thread.start()
        try:
            with short_lived_workers():
                yield made
        finally:
            os.write(stopped, b"x")
            thread.join()
    finally:
        for descriptor in (*devices.values(), stop, stopped):
            os.close(descriptor)
        for place in places:
            subprocess.run(["ip", "netns", "del", made.name(place)], capture_output=True, check=False)


def _device(namespace: str, address: str, gateway: int | None) -> int:
    """A TUN device in a namespace; what the namespace sends can be read from it."""
    descriptors: list[int] = []

    def make() -> None:
        import fcntl  # Windows has none, and does not come here

        enter(namespace)
        descriptor = os.open(TUN, os.O_RDWR)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH14x", b"wan", _IFF_TUN_NO_PI))
        descriptors.append(descriptor)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    for command in (["link", "set", "lo", "up"], ["addr", "add", address, "dev", "wan"], ["link", "set", "wan", "up"]):
        _ip("-n", namespace, *command)
    if gateway is not None:
        _ip("-n", namespace, "route", "add", "default", "via", str(IPv4Address(gateway)), "dev", "wan")
    return descriptors[0]


def _carry(devices: dict[str, int], made: Internet, stop: int) -> None:
    while True:
        ready, _, _ = select.select([*devices.values(), stop], [], [])
        if stop in ready:
            return
        for place, descriptor in devices.items():
            if descriptor in ready:
                _forward(place, bytearray(os.read(descriptor, 65_536)), devices, made)


def _forward(place: str, packet: bytearray, devices: dict[str, int], made: Internet) -> None:
    if packet[0] != 0x45 or packet[9] not in {6, 17}:  # plain IPv4, TCP and UDP only
        return
    router = made.routers.get(place)
    if packet[9] == 17:
        if router is not None and router.speaks_nat_pmp and flows(packet)[1] == (router.gateway, 5351):
            os.write(devices[place], _reply(packet, router.answer(bytes(packet[28:]))))
        return
    if router is not None and not router.outwards(packet):
        return
    target = flows(packet)[1][0]
    if target == int(IPv4Address(made.relay)):
        os.write(devices["relay"], packet)
        return
    for home, other in made.routers.items():
        if target == other.outside and other.inwards(packet):
            os.write(devices[home], packet)


def _reply(packet: bytearray, answer: bytes) -> bytes:
    """A datagram back to who sent one."""
    (source, source_port), (target, target_port) = flows(packet)
    head = bytearray(struct.pack("!BBHHHBBHII", 0x45, 0, 28 + len(answer), 0, 0, 64, 17, 0, target, source))
    total = sum(struct.unpack("!10H", head))
    head[10:12] = (~((total & 0xFFFF) + (total >> 16)) & 0xFFFF).to_bytes(2, "big")
    return bytes(head) + struct.pack("!HHHH", target_port, source_port, 8 + len(answer), 0) + answer
