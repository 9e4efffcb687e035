from __future__ import annotations

import pytest

from neuroshard.membership.network_opening import TrafficMeter
from neuroshard.network import Connection
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId


def connection(peer: str, since: float, sent: int, received: int) -> Connection:
    kind = ConnectionKind.DIRECT
    return Connection(NodeId(peer), "", kind, is_outbound=True, since=since, bytes_sent=sent, bytes_received=received)


def test_totals_keep_what_ended_connections_carried() -> None:
    meter = TrafficMeter()
    meter.look([connection("a", 0, 10, 20), connection("b", 0, 1, 2)], now=0)
    assert meter.look([connection("a", 0, 30, 40)], now=1).sent == 31
    again = meter.look([connection("a", 0, 30, 40), connection("b", 2, 100, 200)], now=2)
    assert (again.sent, again.received) == (131, 242)
    assert (meter.look([], now=3).sent, meter.look([], now=4).received) == (131, 242)


def test_rates_are_means_over_the_last_seconds() -> None:
    meter = TrafficMeter()
    for second in range(40):
        traffic = meter.look([connection("a", 0, 1000 * second, 500 * second)], now=float(second))
    assert traffic.sent_a_second == pytest.approx(1000)
    assert traffic.received_a_second == pytest.approx(500)
    for second in range(40, 60):
        traffic = meter.look([connection("a", 0, 39_000, 19_500)], now=float(second))
    assert traffic.sent_a_second == 0
    assert traffic.sent == 39_000
