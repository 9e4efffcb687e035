"""An address to which no route leads is an error that says so, and nothing else ends."""

from __future__ import annotations

import json
from pathlib import Path

from namespaces import NEAR, local_network

PROGRAM = Path(__file__).with_name("no_route_program.py")


def test_where_no_route_leads_is_told_and_others_are_reached_as_before() -> None:
    with local_network() as (near, _), near.start(PROGRAM, NEAR) as program:
        said = json.loads(program.line(60))
        program.end()
    for way, number in (("libp2p", 1), ("pool", 2)):
        error, answered = said[way]
        assert error.startswith(("PeerUnreachableError: ", "NotDeliveredError: ")), said
        assert "Network is unreachable" in error or "203.0.113.1" in error
        assert answered == number
