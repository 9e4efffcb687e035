"""Programs for the computers of `tests.worlds.lan`: parts of a node, a whole node, a seed, a hostile peer, a router.

    lan_programs.py nearby|flood|node|mapping NUMBER HOST [NAME=VALUE ...]   values are settings of the whole node
    lan_programs.py router HOST OUTSIDE SPEAKS
    lan_programs.py seed [ARGUMENT ...]

Each prints JSON lines and ends with its standard input; the last line of the first four reports what they left behind.
A seed is `neuroshard seed` itself. A router prints every action that it is asked for. SPEAKS is "leases" for UPnP,
"permanent" for UPnP of a router that knows no leases, "nat-pmp", or "both".
"""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random

import anyio
import psutil
import trio

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
from tests.worlds.claims import identity_of
from tests.worlds.lan import NatPmpBox, network_at

WAN = "urn:schemas-upnp-org:service:WANIPConnection:1"
KINDS = "urn:schemas-upnp-org:device:"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{KINDS}InternetGatewayDevice:1</deviceType><friendlyName>Box</friendlyName><UDN>uuid:1</UDN>
<deviceList><device><deviceType>{KINDS}WANDevice:1</deviceType><UDN>uuid:2</UDN>
<deviceList><device><deviceType>{KINDS}WANConnectionDevice:1</deviceType><UDN>uuid:3</UDN>
<serviceList><service><serviceType>{WAN}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/events</eventSubURL><SCPDURL>/scpd.xml</SCPDURL></service></serviceList>
</device></deviceList></device></deviceList></device></root>"""
ENVELOPE = '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>{}</s:Body></s:Envelope>'
FAULT = (
    "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
    '<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{}</errorCode></UPnPError></detail></s:Fault>'
)


def say(**said: object) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


async def nearby(number: int, host: str) -> None:
    """Only the finding of others, for a node that says it listens at port 4000 + its number."""
    node_id = identity_of(number).node_id

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
        peer_network = PeerNetwork.of(settings, identity_of(number))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer_network.networking.run)
            network = await peer_network.networking.up()
            inside = network.transport.addresses()
            say(addresses=inside)
            while not network.transport.connections():
                await anyio.sleep(0.05)
                if network.transport.addresses() != inside:
                    say(outside=network.transport.addresses()[0])
                    await anyio.sleep_forever()
                if "router" in (explanation := peer_network.look().network.explanation):
                    say(explanation=explanation, addresses=network.transport.addresses())
                    await anyio.sleep_forever()
            say(met=[connection.peer for connection in network.transport.connections()])


async def mapping(number: int, host: str) -> None:
    """Only the asking of the router."""
    node_id = identity_of(number).node_id
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


def run_part() -> None:
    """A part of a node, or all of it, until standard input ends."""
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


@dataclass
class Box:
    """What the router knows."""

    outside: str
    knows_leases: bool
    open: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])

    def answer(self, action: str, given: dict[str, str]) -> dict[str, str] | int:
        """Values, or the number of an error."""
        say(action=action, **given)
        port = given.get("NewExternalPort", "")
        if action == "GetStatusInfo":
            return {"NewConnectionStatus": "Connected", "NewLastConnectionError": "ERROR_NONE", "NewUptime": "9"}
        if action == "GetExternalIPAddress":
            return {"NewExternalIPAddress": self.outside}
        if action == "AddPortMapping":
            return self.add(port, given)
        if port not in self.open:
            return 714
        host, inner = self.open[port]
        if action == "DeletePortMapping":
            del self.open[port]
            return {}
        return {"NewInternalClient": host, "NewInternalPort": inner, "NewEnabled": "1", "NewLeaseDuration": "9"}

    def add(self, port: str, given: dict[str, str]) -> dict[str, str] | int:
        if given["NewLeaseDuration"] != "0" and not self.knows_leases:
            return 725
        self.open[port] = (given["NewInternalClient"], given["NewInternalPort"])
        return {}


def handler_of(box: Box) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, DESCRIPTION)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            action = self.headers["SOAPAction"].strip('"').rpartition("#")[2]
            answer = box.answer(action, dict(re.findall(r"<(New\w+)[^>]*>([^<]*)</", body)))
            if isinstance(answer, int):
                self.reply(500, ENVELOPE.format(FAULT.format(answer)))
            else:
                values = "".join(f"<{key}>{value}</{key}>" for key, value in answer.items())
                inner = f'<u:{action}Response xmlns:u="{WAN}">{values}</u:{action}Response>'
                self.reply(200, ENVELOPE.format(inner))

        def reply(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def answer_searches(own: str, port: int) -> None:
    """SSDP: tell whoever looks for a router where its description is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", 1900))
        sock.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("239.255.255.250") + socket.inet_aton(own)
        )
        while True:
            packet, asker = sock.recvfrom(2048)
            kind = re.search(rb"(?im)^ST: *(.+?)\r?$", packet)
            if packet.startswith(b"M-SEARCH") and kind and b"InternetGatewayDevice:1" in kind[1]:
                lines = ("HTTP/1.1 200 OK", f"ST: {kind[1].decode()}", "USN: uuid:1", "EXT:", "SERVER: box")
                location = f"LOCATION: http://{own}:{port}/description.xml"
                sock.sendto("\r\n".join((*lines, location, "", "")).encode(), asker)


def answer_nat_pmp(sock: socket.socket, outside: str) -> None:
    """NAT-PMP: answer whoever asks."""
    box = NatPmpBox(outside)
    while True:
        packet, asker = sock.recvfrom(2048)
        answer = box.answer(packet)
        if answer is not None:
            what, *values = box.questions[-1]
            say(action=f"nat-pmp {what}", values=values)
            sock.sendto(answer, asker)


def route() -> None:
    """A home router."""
    own, outside, speaks = sys.argv[2:]
    if speaks in {"nat-pmp", "both"}:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((own, 5351))
        threading.Thread(target=answer_nat_pmp, args=(sock, outside), daemon=True).start()
    if speaks != "nat-pmp":
        server = ThreadingHTTPServer((own, 0), handler_of(Box(outside, speaks != "permanent")))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Thread(target=answer_searches, args=(own, server.server_port), daemon=True).start()
    say(action="started")
    sys.stdin.read()


def seed() -> None:
    from neuroshard.cli.main import main as neuroshard

    sys.argv = ["neuroshard", *sys.argv[1:]]
    neuroshard()


if __name__ == "__main__":
    if sys.argv[1] == "router":
        route()
    elif sys.argv[1] == "seed":
        seed()
    else:
        run_part()
