"""Check the form of a node's address without the network library.

A complete address is a multiaddr with the node's id: /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

from neuroshard.types import MAX_ADDRESS_CHARACTERS

MULTIADDR_FORM = "/ip4/203.0.113.7/tcp/4001/p2p/<node id>"

_FORM = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)/p2p/([^/]+)(?:/p2p-circuit/p2p/([^/]+))?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_NODE_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")  # the peer id of an Ed25519 key in base58


def checked_multiaddr(text: str) -> str:
    """Return `text` if it has an IP address or host name, a TCP port and a node id, directly or through a relay.

    Raises ValueError with a description of the defect otherwise.
    """
    shown = repr(text[:80])
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise ValueError(f"{shown}... has more than {MAX_ADDRESS_CHARACTERS} characters")
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown} {_what_is_missing(text)}")
    protocol, host, port, *nodes = match.groups()
    if not _is_host(protocol, host):
        raise ValueError(f"{shown} has {host[:40]!r} where {protocol} needs {_HOSTS.get(protocol, 'a host name')}")
    if len(port) > 5 or not 1 <= int(port) <= 65_535:
        raise ValueError(f"{shown} has the port {port[:20]}; 1 to 65535 are possible")
    for node in nodes:
        if node is not None and not _NODE_ID.fullmatch(node):
            raise ValueError(f"{shown} has {node[:60]!r}, which is not a node id (12D3KooW and 44 more characters)")
    return text


_HOSTS = {"ip4": "an IPv4 address", "ip6": "an IPv6 address"}


def _what_is_missing(text: str) -> str:
    if not text.startswith(("/ip4/", "/ip6/", "/dns/", "/dns4/", "/dns6/")):
        return "does not start with /ip4/, /ip6/, /dns/, /dns4/ or /dns6/"
    if "/tcp/" not in text:
        return "has no /tcp/<port>"
    if "/p2p/" not in text:
        return "does not end with /p2p/<node id>"
    return f"is not of the form {MULTIADDR_FORM}"


def _is_host(protocol: str, host: str) -> bool:
    if protocol.startswith("dns"):
        return len(host) <= 253 and _HOST_NAME.fullmatch(host) is not None
    try:
        _ = IPv4Address(host) if protocol == "ip4" else IPv6Address(host)
    except ValueError:
        return False
    return True
