"""A home router for tests inside a network namespace: `router_program.py OWN-ADDRESS OUTSIDE SPEAKS`.

It prints every action it is asked for as a JSON line and ends with its standard input. SPEAKS: "leases" for UPnP,
"permanent" for UPnP of a router that knows no leases, "nat-pmp", or "both".
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nat_pmp_gateway import NatPmpBox

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


@dataclass
class Box:
    """What the router knows."""

    outside: str
    knows_leases: bool
    open: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])

    def answer(self, action: str, given: dict[str, str]) -> dict[str, str] | int:
        """Values, or the number of an error."""
        sys.stdout.write(json.dumps({"action": action, **given}) + "\n")
        sys.stdout.flush()
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
            sys.stdout.write(json.dumps({"action": f"nat-pmp {what}", "values": values}) + "\n")
            sys.stdout.flush()
            sock.sendto(answer, asker)


def main() -> None:
    own, outside, speaks = sys.argv[1:]
    if speaks in {"nat-pmp", "both"}:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((own, 5351))
        threading.Thread(target=answer_nat_pmp, args=(sock, outside), daemon=True).start()
    if speaks != "nat-pmp":
        server = ThreadingHTTPServer((own, 0), handler_of(Box(outside, speaks != "permanent")))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Thread(target=answer_searches, args=(own, server.server_port), daemon=True).start()
    sys.stdout.write(json.dumps({"action": "started"}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
