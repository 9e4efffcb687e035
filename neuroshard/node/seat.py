"""A node's place on this computer: the lock of its data folder and its port; and where another one sits already."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from neuroshard.api.access import entry_address, load_or_create_secret
from neuroshard.api.address import dashboard_url
from neuroshard.config.instance_lock import InstanceLock, LockOwner
from neuroshard.node.desktop import open_browser_at


@dataclass(frozen=True)
class Seat:
    """What a first run hands to the node that it becomes; without a listener the node binds its own."""

    lock: InstanceLock
    listener: socket.socket | None


def show_first_instance(data_dir: Path, running: LockOwner, *, open_browser: bool) -> int:
    """A second start on the same data folder shows the first one's page and ends well; the exit code."""
    url = dashboard_url(running.host, running.port) if running.port else "its dashboard"
    does = "already waits to be set up" if running.is_setup else "already runs"
    sys.stdout.write(f"A node {does} on this data folder (process {running.pid}): {url}\n")
    if open_browser and running.port:
        keyed = entry_address(url, load_or_create_secret(data_dir), running.port, time.time())
        open_browser_at(keyed if running.is_setup else url)
    return 0
