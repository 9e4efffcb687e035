"""How hivemind's processes are kept on this computer: they listen on loopback, and ask no router for a port."""

from __future__ import annotations

from typing import Any

LOOPBACK: dict[str, Any] = {
    "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
    "nat_port_map": False,
    "auto_nat": False,
    "use_relay": False,
    "use_auto_relay": False,
}
