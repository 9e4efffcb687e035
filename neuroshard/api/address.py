"""The address of the API: the host names of this node, the check of Host headers, and binding the port.

The check defends against DNS rebinding and foreign pages. The port is bound before any thread starts, so that a busy
port is reported as a clear error."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from neuroshard.errors import NetworkRefusedError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound
HOST_HEADER = re.compile(r"(?P<name>\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,253})(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True)
class HostPolicy:
    """The host names and the port of this node's API, and the address that its owner opens."""

    names: frozenset[str]  # lower case, IPv6 in brackets
    port: int
    any_address: bool  # bound to every address of this computer: any literal address is then accepted
    url: str

    @classmethod
    def for_host(cls, host: str, port: int) -> HostPolicy:
        """Make the policy of a server bound to `host` (a name or an address) and `port`."""
        names = set(LOOPBACK_NAMES)
        if host in WILDCARDS:
            own = socket.gethostname().lower()
            names |= {own, f"{own}.local"}
        else:
            names |= {f"[{host.lower()}]" if ":" in host else host.lower(), local_name(host)}
        return cls(frozenset(names), port, host in WILDCARDS, dashboard_url(host, port))

    def allows(self, host_header: str) -> bool:
        """Whether this Host header names this node."""
        match = HOST_HEADER.fullmatch(host_header.lower())
        if match is None:
            return False
        if match["port"] is not None and int(match["port"]) != self.port:
            return False
        # DNS cannot rebind a literal address: a page whose origin is that address was served by it.
        return match["name"] in self.names or (self.any_address and is_address(match["name"]))


def local_name(host: str) -> str:
    """Host part of the URL at which programs on this computer reach a server bound to `host`."""
    if host.lower() == "localhost":
        return "127.0.0.1"  # `bind` prefers IPv4 if localhost has both addresses
    if not is_address(host):
        return host.lower()
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else "127.0.0.1"
    return f"[{address}]" if address.version == 6 else str(address)


def local_url(host: str, port: int) -> str:
    """URL at which programs on this computer reach a server bound to `host` and `port`."""
    return f"http://{local_name(host)}:{port}"


def dashboard_url(host: str, port: int) -> str:
    """The URL of `local_url` for people."""
    return for_people(local_url(host, port))


def for_people(url: str) -> str:
    """The URL with localhost instead of 127.0.0.1: browsers keep the cookies of the two apart."""
    return url.replace("//127.0.0.1:", "//localhost:")


def is_address(name: str) -> bool:
    """Whether the name part of a Host header is a literal IP address; an IPv6 address may be in brackets."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def origin_of(host_header: str) -> str:
    """Origin of a page that was served under this Host header."""
    return f"http://{host_header.lower()}"


BACKLOG = 512


def bind(host: str, port: int) -> socket.socket:
    """Open a listening, non-blocking socket. Port 0 selects a free one; `getsockname` returns it.

    The caller closes the socket. Raises NetworkRefusedError with the port and the action to take.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)  # IPv4 first
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be a domain name
        why = getattr(error, "strerror", None) or error
        raise NetworkRefusedError(f"The address {host} cannot be used: {why}.", "Choose another --host.") from error
    try:
        if os.name == "posix":  # on Windows this option would let two programs share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # listen now: requests during the server's start wait instead of failing
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from error
    return listener


def _refusal(host: str, port: int, error: OSError) -> NetworkRefusedError:
    """The error for the user, with an action that fits the cause."""
    if error.errno == errno.EADDRINUSE:
        action = "Another program uses it: stop that program, or choose another port with --port."
        return NetworkRefusedError(f"Port {port} on {host} is busy.", action)
    if error.errno == errno.EACCES:
        return NetworkRefusedError(f"Port {port} on {host} is not allowed.", "Choose a port above 1023 with --port.")
    return NetworkRefusedError(f"Port {port} on {host} cannot be used: {error.strerror}.", "Check --host and --port.")
