"""Run by another Python that has hivemind: one averager at an address of its own, which averages with others.

Arguments: address, number, how many peers, which codec. Says {"maddrs"}; obeys JSON objects on stdin, one a line:
{"initial": [...]} joins the DHT of these and says {"ready"}; {"meet": true} finds a group and says {"ready"};
{"average": true} exchanges with it and says its seconds and CPU seconds; {"check": true} says the relative error of
what came out. Nothing asks a router for a port.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager  # type: ignore[import-not-found]
from hivemind.averaging.control import AveragingStage  # type: ignore[import-not-found]
from hivemind.dht import DHT  # type: ignore[import-not-found]

from benchmarks.hivemind_averager import CODECS, NUMBERS, cpu_seconds
from benchmarks.hivemind_loopback import LOOPBACK

LONGEST_SECONDS = 120  # of an averaging
MEETING_SECONDS = 6.0  # more than three round trips and a request for each peer: all of them are in one group


def main() -> None:
    """Obey the orders, described above."""
    address, number, peers, codec = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), list(CODECS)[int(sys.argv[4])]
    torch.set_num_threads(1)
    place = {**LOOPBACK, "host_maddrs": [f"/ip4/{address}/tcp/0"]}
    first = DHT(start=True, **place) if number == 0 else None
    _say({"maddrs": [] if first is None else list(map(str, first.get_visible_maddrs()))})
    dht = first or DHT(initial_peers=_order()["initial"], start=True, **place)
    if first is not None:
        _order()
    vector = _vector(number)
    averager = DecentralizedAverager(
        (vector,),
        dht,
        prefix=f"homes{codec.replace(' ', '')}",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=MEETING_SECONDS,
        initial_group_bits="",
        compression=CODECS[codec](),
        start=True,
    )
    mean = torch.stack([_vector(one) for one in range(peers)]).mean(dim=0)
    _say({"ready": True})
    control: Any = None
    while True:
        match _order():
            case {"meet": True}:
                control = averager.step(wait=False, require_trigger=True, timeout=LONGEST_SECONDS)
                while control.stage != AveragingStage.AWAITING_TRIGGER:
                    if control.done():
                        raise RuntimeError("the averagers did not meet")
                    time.sleep(0.01)
                _say({"ready": True})
            case {"average": True}:
                cpu, start = cpu_seconds(), time.perf_counter()
                control.allow_allreduce()
                control.result(timeout=LONGEST_SECONDS)
                _say({"seconds": time.perf_counter() - start, "cpu": cpu_seconds() - cpu})
            case _:
                with averager.get_tensors() as (averaged,):
                    _say({"error": float((averaged - mean).norm() / mean.norm())})


def _vector(number: int) -> torch.Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(number))


def _order() -> dict[str, Any]:
    line = sys.stdin.readline()
    return dict(json.loads(line)) if line else sys.exit(0)


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
