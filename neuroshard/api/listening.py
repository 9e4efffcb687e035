"""Binding the API's port, before any thread starts, so that a busy port is an error in plain words."""

from __future__ import annotations

import errno
import os
import socket

from neuroshard.errors import NetworkRefusedError

BACKLOG = 512


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one (`getsockname` tells it). The caller closes it.

    Raises NetworkRefusedError that names the port and what to do.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)  # IPv4 first
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter for a name that no domain can have
        why = getattr(error, "strerror", None) or error
        raise NetworkRefusedError(f"The address {host} cannot be used: {why}.", "Choose another --host.") from error
    try:
        if os.name == "posix":  # elsewhere this option would let two programs share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # already now: requests made while the server starts wait instead of failing
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from error
    return listener


def _refusal(host: str, port: int, error: OSError) -> NetworkRefusedError:
    """The error for people."""
    if error.errno == errno.EADDRINUSE:
        action = "Another program uses it: stop that program, or choose another port with --port."
        return NetworkRefusedError(f"Port {port} on {host} is busy.", action)
    if error.errno == errno.EACCES:
        return NetworkRefusedError(f"Port {port} on {host} is not allowed.", "Choose a port above 1023 with --port.")
    return NetworkRefusedError(f"Port {port} on {host} cannot be used: {error.strerror}.", "Check --host and --port.")
