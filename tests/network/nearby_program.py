"""Programs that tests start inside a network namespace: `nearby_program.py WHAT NUMBER [ADDRESS]`.

Each prints JSON lines and ends with its standard input; its last line tells what it left behind. `node` takes settings
as further arguments: NAME=VALUE.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from random import Random

import anyio
import psutil
import trio
from made_identity import identity
from network_of_addresses import network_at

from neuroshard.config.settings import Settings
from neuroshard.identity import NodeKey
from neuroshard.network.mdns import (
    GROUP,
    PORT,
    MdnsDiscovery,
    announcement,
    lan_interfaces,
    open_socket,
    places_of,
    question,
)
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.nat.port_mapping import PortMapping


def say(**said: object) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


async def nearby(number: int, host: str) -> None:
    """Only the finding of others, for a node that says it listens at port 4000 + its number."""
    node_id = identity(number).node_id

    def tell(addresses: Iterable[str]) -> None:
        for address in addresses:
            say(found=address)

    network = network_at(node_id, f"/ip4/{host}/tcp/{4000 + number}/p2p/{node_id}")
    await MdnsDiscovery(node_id, tell).live(network)


async def flood(number: int, host: str) -> None:
    """Thousands of hostile packets, then silence."""
    with trio.fail_after(10):  # a new interface takes a moment to come up
        while not (places := places_of([f"/ip4/{host}/tcp/1/p2p/x"], lan_interfaces())):
            await trio.sleep(0.05)
    (place,) = places
    random = Random(number)
    with open_socket(place.interface) as sock:
        for index in range(5000):
            stranger = NodeKey.from_seed(random.randbytes(32)).node_id
            packets = (
                random.randbytes(random.randint(0, 1400)),
                announcement(stranger, ["8.8.8.8", "127.0.0.1"], 4001),
                announcement(stranger, [f"10.77.0.{index % 250 + 3}"], 4001),
                question(stranger),
            )
            await sock.sendto(packets[index % 4], (GROUP, PORT))
    say(flooded=True)


async def node(number: int, host: str) -> None:
    """A whole node's network; `host` as --p2p-host."""
    from neuroshard.node.peer_network import PeerNetwork

    chosen = dict(argument.split("=") for argument in sys.argv[4:])
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.model_validate({"data_dir": Path(folder), "p2p_host": host, **chosen})
        society = PeerNetwork.of(settings, identity(number))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(society.networking.run)
            network = await society.networking.up()
            inside = network.transport.addresses()
            say(addresses=inside)
            while not network.transport.connections():
                await anyio.sleep(0.05)
                if network.transport.addresses() != inside:
                    say(outside=network.transport.addresses()[0])
                    await anyio.sleep_forever()
                if "router" in (explanation := society.look().network.explanation):
                    say(explanation=explanation, addresses=network.transport.addresses())
                    await anyio.sleep_forever()
            say(met=[connection.peer for connection in network.transport.connections()])


async def mapping(number: int, host: str) -> None:
    """Only the asking of the router."""
    node_id = identity(number).node_id
    ports, inner = ExternalAddresses(), (4000 + number, 5000 + number)
    with ports.listening(lambda: (host,), inner):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(PortMapping(ports).live, network_at(node_id))
            while any(ports.of(port) is None for port in inner):
                await anyio.sleep(0.05)
            say(outside=[ports.of(port) for port in inner])


async def until_input_ends(work: Callable[[], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        say(started=True)
        while await trio.lowlevel.wait_readable(sys.stdin) is None and sys.stdin.read(1):
            pass
        tasks.cancel_scope.cancel()


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    what, number, host = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    work = {"nearby": nearby, "flood": flood, "node": node, "mapping": mapping}[what]

    async def chosen() -> None:
        await work(number, host)

    process = psutil.Process()
    before = {thread.name for thread in threading.enumerate()}
    trio.run(until_input_ends, chosen)
    left = [thread.name for thread in threading.enumerate() if thread.name not in before]
    say(threads=[name for name in left if not name.startswith("Trio thread")], sockets=len(process.net_connections()))


if __name__ == "__main__":
    main()
