"""Started inside a network namespace without a way out: asks where no route leads, over libp2p and over the pool.

Prints one JSON line: the errors, and what the same node and pool answered after them.
"""

from __future__ import annotations

import json
import sys

import anyio
import trio
from made_identity import identity

from neuroshard.errors import NeuroShardError
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.network.pool import PoolOptions, bulk_pool
from neuroshard.network.serving import RequestServer
from neuroshard.types import NodeId

NOWHERE = "203.0.113.1"
STRANGER = identity(9).node_id


async def echo(_: NodeId, frame: Frame) -> Frame:
    return frame


async def over_libp2p() -> list[object]:
    options = NetworkOptions(host=sys.argv[1], pool_port=None)
    async with libp2p_network(identity(1), options) as one, libp2p_network(identity(2), options) as other:
        other.transport.serve("echo", echo)
        await one.transport.connect(other.transport.addresses()[0])
        error = ""
        try:
            await one.transport.connect(f"/ip4/{NOWHERE}/tcp/4001/p2p/{STRANGER}")
        except NeuroShardError as raised:
            error = f"{type(raised).__name__}: {raised}"
        answer = await one.transport.request(other.transport.local_id, Frame("echo", {"n": 1}), timeout_seconds=5)
        return [error, answer.header["n"]]


async def over_the_pool() -> list[object]:
    server, options = RequestServer(), PoolOptions(host=sys.argv[1])
    server.serve("echo", echo, FrameLimits(), 4)
    async with bulk_pool(identity(1), server, options) as one, bulk_pool(identity(2), server, options) as other:
        error = ""
        try:
            await one.request(STRANGER, (NOWHERE, 4001), Frame("echo", {"n": 2}), timeout_seconds=20)
        except NeuroShardError as raised:
            error = f"{type(raised).__name__}: {raised}"
        answer = await one.request(identity(2).node_id, other.endpoint(), Frame("echo", {"n": 2}), timeout_seconds=5)
        return [error, answer.header["n"]]


async def main() -> None:
    with anyio.fail_after(60):
        began = anyio.current_time()
        said = {"libp2p": await over_libp2p(), "pool": await over_the_pool(), "seconds": anyio.current_time() - began}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main)
