"""A stranger asks the observer of a real organiser to relay for it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from libp2p.relay.circuit_v2.pb.circuit_pb2 import Status

from benchmarks.node_process import free_port
from benchmarks.organiser_process import running_organiser
from neuroshard.config.folders import NodePaths
from neuroshard.identity import NodeKey
from neuroshard.network import Network, PeerUnreachableError
from neuroshard.network.libp2p.host import ask_identity
from neuroshard.network.libp2p.relay_messages import HOP_PROTOCOL
from neuroshard.organiser.observer_process import OBSERVER
from neuroshard.runs.authority_key import ORGANISER_FOLDER
from tests.network.libp2p.test_libp2p_relay_members import RESERVE, status_of
from tests.worlds.network_nodes import nodes, run
from tests.worlds.processes import made

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
CONFIG = 'admission = "admitted"\narchitecture = { depth = 2, sequence_length = 64 }\n'


async def connect(stranger: Network, address: str) -> None:
    """Connect with a process that may not listen yet."""
    while True:
        try:
            await stranger.transport.connect(address)
        except PeerUnreachableError:
            await anyio.sleep(0.5)
        else:
            return


@pytest.mark.parametrize("variables", [{}, {"NEUROSHARD_RELAY": "false"}], ids=["by default", "turned off"])
def test_the_observer_is_a_relay_for_members_unless_the_organiser_turns_it_off(
    small_genesis: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    its_run = made(CONFIG, small_genesis, tmp_path)
    folder = its_run.data_dir / ORGANISER_FOLDER / its_run.run_id[:16] / OBSERVER
    observer, port = NodeKey.load_or_create(NodePaths.below(folder).node_key).node_id, free_port()

    async def scenario() -> None:
        async with nodes(1) as (stranger,):
            await connect(stranger, f"/ip4/127.0.0.1/tcp/{port}/p2p/{observer}")
            muxer = stranger.transport._connections.of(observer)
            if variables:
                assert HOP_PROTOCOL not in (await ask_identity(muxer)).protocols
            else:
                assert HOP_PROTOCOL in (await ask_identity(muxer)).protocols
                assert await status_of(stranger, observer, RESERVE) == Status.PERMISSION_DENIED

    asked = ("--p2p-port", str(port))
    with running_organiser(its_run.data_dir, tmp_path / "signed.json", asked, is_monitored=True, variables=variables):
        run(scenario)
