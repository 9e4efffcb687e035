"""What `neuroshard doctor` looks at towards others: ports, router, peers, and the clock by the word of another one."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from neuroshard.cli.doctor_looks import Case, Finding

DIAL_SECONDS = 3.0
CLOCK_SECONDS = 5.0
MOST_CLOCK_ERROR_SECONDS = 30.0  # signed reports are dropped after 60 s
MOST_DIALS = 8
_SET_CLOCK = "Set this computer's date and time, best by the network: others refuse reports that seem old."


def port(case: Case) -> Finding:
    """The port of dashboard and API: free, or this folder's own node's."""
    from neuroshard.api.listening import bind
    from neuroshard.training.checkpoint.lock import read_lock_owner

    settings = case.loaded.settings
    owner = read_lock_owner(settings.data_dir)
    if owner is None:
        bind(settings.host, settings.port).close()
        return Finding("port", is_well=True, detail=f"{settings.port} is free")
    if owner.is_setup:
        detail = f"the wizard of the first run waits at port {owner.port}"
        return Finding("port", is_well=True, detail=detail, action="`neuroshard` opens its page again: finish there.")
    if case.status is None:
        detail = f"process {owner.pid} holds {settings.data_dir}, but no node answers at port {owner.port}"
        return Finding("port", is_well=False, detail=detail, action="Wait for its start, or end that process.")
    return Finding("port", is_well=True, detail=f"a node of this folder is running at port {owner.port}")


def p2p_port(case: Case) -> Finding:
    """The port for other nodes."""
    settings = case.loaded.settings
    if not settings.network:
        return Finding("p2p port", is_well=True, detail="not needed: the network is off")
    if case.status is not None:
        addresses = ", ".join(case.status["network"]["addresses"]) or "no address yet"
        return Finding("p2p port", is_well=True, detail=f"the running node has {addresses}")
    if settings.p2p_port == 0:
        return Finding("p2p port", is_well=True, detail=f"any free one of {settings.p2p_host}")
    from neuroshard.errors import NetworkRefusedError

    family = socket.AF_INET6 if ":" in settings.p2p_host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.p2p_host, settings.p2p_port))
    except OSError as error:
        raise NetworkRefusedError(
            f"{settings.p2p_host}:{settings.p2p_port} cannot be used: {error.strerror or error}.",
            "Name another with --p2p-port, or 0 for any free one.",
        ) from error
    return Finding("p2p port", is_well=True, detail=f"{settings.p2p_port} is free")


def nat(case: Case) -> Finding:
    """How others can reach this computer."""
    from neuroshard.network.gateway import default_gateway, host_towards_outside

    settings = case.loaded.settings
    if case.status is not None:
        network: Mapping[str, Any] = case.status["network"]
        is_well = network["state"] != "failed"
        action = "" if is_well else "Training goes on and it tries again; `neuroshard logs` tells more."
        return Finding("nat", is_well=is_well, detail=f"{network['state']}: {network['explanation']}", action=action)
    if not settings.network:
        return Finding("nat", is_well=True, detail="the network is off: this node trains alone")
    ways = [
        "asks the router for a port" if settings.port_mapping else "does not ask the router (port_mapping = false)",
        "can be reached through relays" if settings.relay else "uses no relay (relay = false)",
    ]
    outside, router = host_towards_outside(), default_gateway()
    if outside is None:
        detail, action = "there is no way to the internet", "Nodes of the local network still find each other."
        return Finding("nat", is_well=True, detail=detail, action=action)
    behind = f"{outside} behind {router}" if router else outside
    reachable = settings.port_mapping or settings.relay
    action = "" if reachable else "Behind a router nobody can call this node: allow one of the two."
    return Finding("nat", is_well=True, detail=f"{behind}; it {' and '.join(ways)}", action=action)


def peers(case: Case) -> Finding:
    """Who is there: by the running node, else whether known addresses answer."""
    from neuroshard.node.address_book import remembered_addresses
    from neuroshard.node.libp2p_opening import PEERS_FILE

    settings = case.loaded.settings
    if case.status is not None:
        network = case.status["network"]
        detail = f"{network['peers']:,} of the run, {network['connections']:,} connections"
        return Finding("peers", is_well=True, detail=detail)
    if not settings.network:
        return Finding("peers", is_well=True, detail="none: the network is off")
    known = remembered_addresses(settings.data_dir / PEERS_FILE)
    addresses = tuple(dict.fromkeys([*settings.peer, *known]))[:MOST_DIALS]
    if not addresses:
        return Finding("peers", is_well=True, detail="none known yet; the local network and the default run are asked")
    with ThreadPoolExecutor(MOST_DIALS) as dials:
        answers = dict(zip(addresses, dials.map(_answers, addresses), strict=True))
    detail = f"{sum(answers.values())} of {len(answers)} known addresses answer"
    silent = [address for address in settings.peer if answers.get(address) is False]
    if silent:
        action = f"{silent[0]} does not answer: is that node running, and is its port open?"
        return Finding("peers", is_well=False, detail=detail, action=action)
    return Finding("peers", is_well=True, detail=detail)


def clock(case: Case) -> Finding:
    """This computer's date beside that of the data's server; what the running node heard from peers comes first."""
    here = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    told = [text for text in (case.status or {}).get("warnings", []) if "clock" in text.lower()]
    if told:
        return Finding("clock", is_well=False, detail=f"{here}; {told[0]}", action=_SET_CLOCK)
    genesis = str(case.loaded.settings.genesis)
    error = _clock_error(genesis) if genesis.startswith(("http://", "https://")) else None
    if error is None:
        return Finding("clock", is_well=True, detail=f"{here}; nobody was there to compare it with")
    is_well = abs(error) <= MOST_CLOCK_ERROR_SECONDS
    detail = f"{here}; {abs(error):,.0f} s {'ahead of' if error > 0 else 'behind'} the data's server"
    return Finding("clock", is_well=is_well, detail=detail, action="" if is_well else _SET_CLOCK)


def _clock_error(url: str) -> float | None:
    """Seconds by which this computer is ahead of a server, by the Date of its answer; None when it tells none."""
    import httpx

    try:
        before = time.time()
        answer = httpx.head(f"{url.rstrip('/')}/manifest.json", timeout=CLOCK_SECONDS, follow_redirects=True)
        middle = (before + time.time()) / 2
        age = int(answer.headers.get("age", 0))  # an answer from a cache has the date of when it was put there
        return middle - parsedate_to_datetime(answer.headers["date"]).timestamp() - age
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError):
        return None


def _answers(address: str) -> bool:
    """Whether the host and port of a multiaddr take a connection."""
    parts = address.split("/")
    try:
        with socket.create_connection((parts[2], int(parts[4])), DIAL_SECONDS):
            return True
    except (OSError, ValueError, IndexError):
        return False
