"""How soon a real `neuroshard` process is known to others: started as a user starts one, with a run and a peer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.to_thread
import httpx

from benchmarks.friends import invitation_code
from benchmarks.identities import identity_of
from benchmarks.node_process import TOKEN, NodeProcess, running_node
from benchmarks.record import Report, Row, load_average
from benchmarks.sizes import size
from benchmarks.texts import write_topics
from neuroshard.dataset import BuildOptions, FolderText, build_genesis
from neuroshard.identity import Wallet, parse_token, read_claim
from neuroshard.membership.announcements import directory_namespace
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.types import NodeId, RunId

STARTS = size(3, 1)
WAIT_SECONDS = size(180.0, 800.0)
LOOK_SECONDS = 0.05
ONLOOKER = 250  # its number
WAY = (
    "They get an invitation and the address of a node of the run, which is paused meanwhile. Each brings up its "
    "dashboard and its network, fetches the run and announces itself; PyTorch is imported after that, and the data "
    "are opened. "
    "Modules lie compiled on the disk since the start of the first node."
)


@dataclass(frozen=True)
class ProcessArrival:
    """Seconds from the start of a process."""

    listening: float  # its network is up
    announced: float  # its record is found in the directory
    seen: float  # by the node whose address it was given


def measure() -> Report:
    """From the start of the process, and from the moment at which its network is up."""
    load = load_average()
    notes = (WAY, f"Load average of the machine before the start: {load}.")
    return Report("first_record", "A process that joins a run", _rows(process_arrivals(STARTS)), notes)


def _rows(arrivals: Sequence[ProcessArrival]) -> tuple[Row, ...]:
    """What a user sees, counted from the start of the process and from the start of its network."""
    whole = max(arrival.announced for arrival in arrivals)
    alone = max(arrival.announced - arrival.listening for arrival in arrivals)
    times = ", ".join(f"{median(getattr(a, f.name) for a in arrivals):.2f}" for f in fields(ProcessArrival))
    name = f"`neuroshard` process, {len(arrivals)} starts"
    return (
        Row(f"{name}: its network is up, record announced, seen; median", f"{times} s", "report", None),
        Row(f"{name}: record announced after the start of the process, worst", f"{whole:.2f} s", "< 2 s", whole < 2),
        Row(f"{name}: record announced after its network is up, worst", f"{alone:.2f} s", "< 2 s", alone < 2),
    )


def process_arrivals(count: int) -> list[ProcessArrival]:
    """Newcomers, one after the other, to a run that one node trains."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--genesis", str(_data(folder)), "--memory", "500", "--cpu-threads", "1"]
        with running_node(folder / "first", flags) as first:
            trains = first.wait_for(
                "address and steps", lambda status: bool(status["network"]["addresses"] and status["training"]["steps"])
            )
            first.post("/api/training/pause")  # a user's own computer is free for the start
            run_id, peer = RunId(trains["run"]["run_id"]), str(trains["network"]["addresses"][0])
            newcomers = [
                _Newcomer(run_id, peer, folder / f"newcomer-{n}", flags, f"{n:02x}" * 32) for n in range(1, count + 1)
            ]
            return [anyio.run(_arrive, first, newcomer, backend="trio") for newcomer in newcomers]


@dataclass(frozen=True)
class _Newcomer:
    """A node that joins as the join line says."""

    run_id: RunId
    peer: str
    data_dir: Path
    flags: Sequence[str]
    token: str

    def running(self) -> AbstractContextManager[NodeProcess]:
        """Its process, within the block."""
        invitation = invitation_code(self.run_id, Wallet.from_secret(parse_token(TOKEN)))
        joining = [*self.flags, "--invite", invitation, "--peer", self.peer]
        return running_node(self.data_dir, joining, variables={"NEUROSHARD_TOKEN": self.token})


def _data(folder: Path) -> Path:
    text, genesis = write_topics(folder / "text"), folder / "genesis"
    wallet = Wallet.from_secret(parse_token(TOKEN))
    options = BuildOptions(vocabulary=400)
    build_genesis(FolderText(text), genesis, wallet, now="2026-01-01T00:00:00+00:00", options=options)
    return genesis


async def _arrive(first: NodeProcess, newcomer: _Newcomer) -> ProcessArrival:
    """Looks from outside: at the directory, at the newcomer's own status, and at whom the first node knows."""
    namespace, times = directory_namespace(newcomer.run_id), dict[str, float]()
    async with libp2p_network(identity_of(ONLOOKER), NetworkOptions(host="127.0.0.1")) as network:
        await network.transport.connect(newcomer.peer)
        before = await _announced(network, namespace)
        # one client for all looks: to make one takes longer than a look
        with httpx.Client(timeout=20, trust_env=False) as client, newcomer.running() as node:
            while len(times) < len(fields(ProcessArrival)):
                said, peers = await anyio.to_thread.run_sync(_looked, client, node, first)
                has_happened = {
                    "listening": bool(said["network"]["addresses"]) if said else False,
                    "announced": bool(await _announced(network, namespace) - before),
                    "seen": bool(said) and said["node_id"] in peers,
                }
                now = time.perf_counter() - node.started
                times |= {event: now for event, has in has_happened.items() if has and event not in times}
                if now > WAIT_SECONDS:
                    raise TimeoutError(f"a newcomer is not known after {WAIT_SECONDS:.0f} s, only {sorted(times)}")
                await anyio.sleep(LOOK_SECONDS)
            node.kill()
    return ProcessArrival(**times)


async def _announced(network: Network, namespace: str) -> set[NodeId]:
    """The nodes whose records are found in the directory."""
    return {read_claim(data, object).delegation.node_id for data in await network.directory.find(namespace)}


def _looked(client: httpx.Client, node: NodeProcess, first: NodeProcess) -> tuple[dict[str, Any], set[str]]:
    """What a newcomer says of itself, nothing while it does not answer, and whom the first node knows."""
    peers = client.get(f"{first.url}/api/peers", headers=first.authorised()).raise_for_status().json()["peers"]
    try:
        said = client.get(f"{node.url}/api/status", headers=node.authorised()).raise_for_status().json()
    except httpx.TransportError:
        said = {}
    return said, {str(peer["node_id"]) for peer in peers}
