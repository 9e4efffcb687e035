from __future__ import annotations

from typing import cast

import pytest
import trio
from google.protobuf.message import Message
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch

from neuroshard.network.libp2p.relay_messages import RelayError, read_message
from neuroshard.network.libp2p.streams import YamuxStream


class Said:
    """A stream on which these bytes come."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, n: int) -> bytes:
        await trio.lowlevel.checkpoint()
        piece, self._data = self._data[:n], self._data[n:]
        return piece


@pytest.mark.parametrize(
    ("kind", "data"),
    [(HopMessage, b"\0"), (StopMessage, b"\0"), (HolePunch, b"\0"), (HolePunch, b"\2\x08\x08")],
    ids=["hop", "stop", "punch", "unknown"],
)
def test_a_message_without_a_type_is_not_taken_for_the_first_type_there_is(kind: type[Message], data: bytes) -> None:
    with pytest.raises(RelayError):
        trio.run(read_message, cast("YamuxStream", Said(data)), kind())
