"""One of two processes between which tensors are sent: `serve` says where it listens, `ask` is told what to send.

Ways: `raw` is one TLS connection of blocking sockets, `pool` connections for bodies, `libp2p` a stream of the first
connection. Both obey JSON objects on stdin, one a line, and answer with one: {"bytes": N} sends so many bytes once,
{"seconds": T} sends for so long, {"round_trips": n} sends a tensor there and back n times, {"cpu": true} tells the CPU
seconds used so far. The end of stdin ends the process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import anyio
import anyio.to_thread

from benchmarks import raw_tls
from benchmarks.identities import identity_of
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network
from neuroshard.types import NodeId

Facts: TypeAlias = Mapping[str, object]
Ask: TypeAlias = Callable[[Frame], Awaitable[Frame]]
DATA_BYTES = 64 * 1024 * 1024
TIMED_FRAME_BYTES = 16 * 1024 * 1024
AT_ONCE = 2  # frames on their way while sending for some time, as in a pipeline
TENSOR_SHAPE = (4, 512, 1024)
TENSOR_BYTES = 4 * 512 * 1024 * 4
LIMITS = FrameLimits(max_body_bytes=256 * 1024 * 1024)
TIMEOUT_SECONDS = 300.0
SERVER = identity_of(1)
ASKER = identity_of(2)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["serve", "ask"])
    parser.add_argument("way", choices=["raw", "pool", "libp2p"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--congestion-control", default=None)
    args = parser.parse_args()
    match args.role, args.way:
        case "serve", "raw":
            _tell({"port": raw_tls.serve(args.host, args.congestion_control)})
            for _ in sys.stdin:
                _tell(_cpu_seconds())
        case _, "raw":
            _ask_raw(args)
        case _:
            anyio.run(_live, args, backend="trio")


def _tell(facts: Facts) -> None:
    print(json.dumps(facts), flush=True)


def _cpu_seconds() -> Facts:
    return {"cpu": time.process_time()}


def _ask_raw(args: argparse.Namespace) -> None:
    with raw_tls.dialled(args.host, args.port, args.congestion_control) as connection:
        _tell({"congestion_control": connection.congestion_control})
        for line in sys.stdin:
            match json.loads(line):
                case {"bytes": int(count)}:
                    _tell(_timed(partial(connection.send, count)))
                case {"seconds": seconds}:
                    _tell(_timed(partial(connection.send_for, float(seconds))))
                case _:
                    _tell(_cpu_seconds())


def _timed(work: Callable[[], int]) -> Facts:
    start = time.perf_counter()
    count = work()
    return {"bytes": count, "seconds": time.perf_counter() - start}


async def _live(args: argparse.Namespace) -> None:
    async with _network(args) as (facts, ask):
        asker = Asker(ask)
        if args.role == "ask":
            await asker.send(0)  # connects
        _tell(facts())
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            _tell({**await _obeyed(asker, json.loads(line)), **facts()})


async def _obeyed(asker: Asker, order: Mapping[str, object]) -> Facts:
    start = time.perf_counter()
    match order:
        case {"bytes": int(count)}:
            done = await asker.send(count)
        case {"seconds": int() | float() as seconds}:
            done = await asker.send_for(seconds)
        case {"round_trips": int(count)}:
            done = await asker.round_trips(count)
        case _:
            return _cpu_seconds()
    return {"bytes": done, "seconds": time.perf_counter() - start}


@asynccontextmanager
async def _network(args: argparse.Namespace) -> AsyncGenerator[tuple[Callable[[], Facts], Ask]]:
    from neuroshard.network.libp2p import NetworkOptions, libp2p_network

    is_server = args.role == "serve"
    options = NetworkOptions(
        args.host if is_server else "0.0.0.0",
        body_connections=args.way == "pool",
        lan_discovery=False,
        port_mapping=False,
        relay=False,
        congestion_control=args.congestion_control,
    )
    async with libp2p_network(SERVER if is_server else ASKER, options) as network:
        transport = network.transport
        transport.serve("swallow", swallowed, LIMITS)
        transport.serve("echo", _echoed, LIMITS)
        if not is_server:
            await transport.connect(f"/ip4/{args.host}/tcp/{args.port}/p2p/{SERVER.node_id}", is_given=True)
        port = int(transport.addresses()[0].split("/tcp/")[1].split("/")[0])

        async def ask(frame: Frame) -> Frame:
            return await transport.request(SERVER.node_id, frame, reply=LIMITS, timeout_seconds=TIMEOUT_SECONDS)

        def facts() -> Facts:
            algorithms = sorted({_algorithm(one) for one in _sockets(network)})
            return {"port": port, "connections": len(_sockets(network)), "congestion_control": " ".join(algorithms)}

        yield facts, ask


def _sockets(network: Network) -> Sequence[Any]:
    """Of the connections for bodies, or of the first one."""
    transport: Any = network.transport
    links = transport._pool._links.values() if transport._pool else ()
    own = [one.stream._raw._stream for link in links for one in link._connections.values()]
    first = [transport._connections.of(one.peer).secured_conn._conn.stream._stream for one in transport.connections()]
    return own or first


def _algorithm(stream: Any) -> str:
    if sys.platform != "linux":
        return "unknown"
    name: bytes = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0")[0].decode()


async def swallowed(_: NodeId, __: Frame) -> Frame:
    """The handler of what an Asker sends."""
    return Frame("done")


async def _echoed(_: NodeId, request: Frame) -> Frame:
    """Through a tensor, as a stage of a model would do."""
    from neuroshard.messages.tensors import part_of, tensor_of

    return Frame("echo", {}, (part_of("activation", tensor_of(request.tensors[0])),))


class Asker:
    """Sends what it is told."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._data = os.urandom(DATA_BYTES)

    async def send(self, count: int) -> int:
        """One frame with so many bytes."""
        part = TensorPart(TensorSpec("x", "uint8", (count,)), memoryview(self._data)[:count])
        await self._ask(Frame("swallow", {}, (part,)))
        return count

    async def send_for(self, seconds: float, frame_bytes: int = TIMED_FRAME_BYTES) -> int:
        """Frames one after the other, AT_ONCE at a time."""
        until = time.perf_counter() + seconds
        sent: list[int] = []

        async def send_some() -> None:
            while time.perf_counter() < until:
                sent.append(await self.send(frame_bytes))

        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(send_some)
        return sum(sent)

    async def round_trips(self, count: int) -> int:
        """A tensor there and back."""
        import torch

        from neuroshard.messages.tensors import part_of, tensor_of

        tensor = torch.frombuffer(bytearray(self._data[:TENSOR_BYTES]), dtype=torch.int32)
        tensor = tensor.to(torch.float32).reshape(TENSOR_SHAPE)
        back = tensor
        for _ in range(count):
            answer = await self._ask(Frame("echo", {}, (part_of("activation", tensor),)))
            back = tensor_of(answer.tensors[0])
        if not torch.equal(back, tensor):
            raise ValueError("the tensor came back changed")
        return 2 * count * TENSOR_BYTES


if __name__ == "__main__":
    main()
