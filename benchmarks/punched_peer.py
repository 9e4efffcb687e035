"""One process of the benchmark of two homes: a relay, a node behind a router, or one that sends to it.

`relay` prints its address, `serve ADDRESS` the address of its circuit through that relay, and `ask CIRCUIT SECONDS`
the rate of what it sent, twice, in JSON. The end of stdin ends the first two.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from functools import partial

import anyio
import anyio.to_thread

from benchmarks.bulk_peer import LIMITS, TIMEOUT_SECONDS, Asker, swallowed
from benchmarks.identities import identity_of
from benchmarks.shaped_line import PUBLIC_ADDRESS
from neuroshard.messages import Frame
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId

ROLES = ("relay", "serve", "ask")
PUNCHED_SECONDS = 60.0


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("seconds", nargs="?", type=float, default=1.0)
    parser.add_argument("--streams", action="store_true", help="No connections for bodies.")
    parser.add_argument("--relayed", action="store_true", help="Measure through the relay; no hole can be punched.")
    parser.add_argument("--echo", action="store_true", help="Each frame comes back.")
    parser.add_argument("--frame-mib", type=int, default=4, help="With loss one connection takes half a minute for 4.")
    parser.add_argument("--congestion-control", default=None)
    anyio.run(_live, parser.parse_args(), backend="trio")


async def _live(args: argparse.Namespace) -> None:
    is_relay = args.role == "relay"
    options = NetworkOptions(
        PUBLIC_ADDRESS if is_relay else "0.0.0.0",
        body_connections=not args.streams,
        lan_discovery=False,
        port_mapping=False,
        relay=not is_relay,
        serve_relay=is_relay,
        congestion_control=args.congestion_control,
    )
    async with libp2p_network(identity_of(ROLES.index(args.role) + 1), options) as network:
        network.transport.serve("swallow", swallowed, LIMITS)
        network.transport.serve("echo", _echoed, LIMITS)
        if args.role == "ask":
            await _ask(network, args)
            return
        if args.address:
            await network.transport.connect(args.address)
        wanted = "/ip4/" if is_relay else "p2p-circuit"
        with anyio.fail_after(PUNCHED_SECONDS):
            while not (found := [text for text in network.transport.addresses() if wanted in text]):
                await anyio.sleep(0.1)
        print(found[0], flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)


async def _echoed(_: NodeId, request: Frame) -> Frame:
    return request


async def _ask(network: Network, args: argparse.Namespace) -> None:
    peer = await network.transport.connect(args.address)
    wanted = ConnectionKind.RELAYED if args.relayed else ConnectionKind.PUNCHED
    with anyio.fail_after(PUNCHED_SECONDS):
        while _kind(network, peer) is not wanted:
            await anyio.sleep(0.1)
    request = partial(network.transport.request, peer, reply=LIMITS, timeout_seconds=TIMEOUT_SECONDS)

    async def ask(frame: Frame) -> Frame:
        return await request(replace(frame, kind="echo") if args.echo else frame)

    rates = list[float]()
    for _ in range(2):
        began = time.perf_counter()
        count = await Asker(ask).send_for(args.seconds, args.frame_mib * 1024 * 1024)
        rates.append(count * 8e-6 / (time.perf_counter() - began))
    (connection,) = (one for one in network.transport.connections() if one.peer == peer)
    print(json.dumps({"mbit": rates, "connections": connection.bulk_connections}), flush=True)


def _kind(network: Network, peer: NodeId) -> ConnectionKind | None:
    return next((one.kind for one in network.transport.connections() if one.peer == peer), None)


if __name__ == "__main__":
    main()
