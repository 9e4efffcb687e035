"""An address to which no route leads is an error that says so, and nothing else ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import trio

from neuroshard.errors import NeuroShardError
from neuroshard.messages import Frame
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.lan import NEAR, local_network

NOWHERE = "203.0.113.1"
STRANGER = identity_of(9).node_id


async def echo(_: NodeId, frame: Frame) -> Frame:
    return frame


async def over_libp2p() -> list[object]:
    options = NetworkOptions(host=sys.argv[1])
    async with libp2p_network(identity_of(1), options) as one, libp2p_network(identity_of(2), options) as other:
        other.transport.serve("echo", echo)
        await one.transport.connect(other.transport.addresses()[0], is_given=True)
        error = ""
        try:
            await one.transport.connect(f"/ip4/{NOWHERE}/tcp/4001/p2p/{STRANGER}")
        except NeuroShardError as raised:
            error = f"{type(raised).__name__}: {raised}"
        answer = await one.transport.request(other.transport.local_id, Frame("echo", {"n": 1}), timeout_seconds=60)
        return [error, answer.header["n"]]


async def main() -> None:
    with anyio.fail_after(60):
        began = anyio.current_time()
        said = {"libp2p": await over_libp2p(), "seconds": anyio.current_time() - began}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


PROGRAM = Path(__file__)


def test_where_no_route_leads_is_told_and_others_are_reached_as_before() -> None:
    with local_network() as (near, _), near.start(PROGRAM, NEAR) as program:
        said = json.loads(program.line(60))
        program.end()
    error, answered = said["libp2p"]
    assert error.startswith("PeerUnreachableError: "), said
    assert "Network is unreachable" in error or "203.0.113.1" in error
    assert answered == 1


if __name__ == "__main__":
    trio.run(main)
