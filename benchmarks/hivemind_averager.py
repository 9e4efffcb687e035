"""Run by another Python that has hivemind: seconds of one averaging of 25 M numbers by its DecentralizedAverager.

Arguments: how many peers, how many rounds, which codec. Prints one JSON object: seconds and CPU seconds. Matchmaking is
not counted: the averagers wait for a signal before they exchange. All its processes listen on loopback only.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import hivemind  # type: ignore[import-not-found]
import psutil
import torch
from hivemind.averaging import DecentralizedAverager  # type: ignore[import-not-found]
from hivemind.averaging.control import AveragingStage  # type: ignore[import-not-found]
from hivemind.compression import (  # type: ignore[import-not-found]
    Float16Compression,
    NoCompression,
    Uniform8BitQuantization,
)
from hivemind.dht import DHT  # type: ignore[import-not-found]

from benchmarks.hivemind_loopback import LOOPBACK
from benchmarks.sizes import size

NUMBERS = size(25_000_000, 25_000)
LARGEST_ERROR = 0.1  # relative
CODECS: dict[str, Any] = {"fp32": NoCompression, "fp16": Float16Compression, "8 bits": Uniform8BitQuantization}


def main() -> None:
    """See above."""
    peers, rounds, codec = int(sys.argv[1]), int(sys.argv[2]), list(CODECS)[int(sys.argv[3])]
    torch.set_num_threads(1)
    print(json.dumps({"version": hivemind.__version__, "codec": codec, **_measured(codec, peers, rounds)}))


def _measured(codec: str, peers: int, rounds: int) -> dict[str, float]:
    first = DHT(start=True, **LOOPBACK)
    dhts = [first, *(DHT(initial_peers=first.get_visible_maddrs(), start=True, **LOOPBACK) for _ in range(peers - 1))]
    vectors = [torch.randn(NUMBERS) for _ in dhts]
    mean = torch.stack(vectors).mean(dim=0)
    averagers = [
        DecentralizedAverager(
            (vector,),
            dht,
            prefix=f"rounds{codec.replace(' ', '')}",
            target_group_size=peers,
            min_group_size=peers,
            min_matchmaking_time=3.0,
            initial_group_bits="",
            compression=CODECS[codec](),
            start=True,
        )
        for vector, dht in zip(vectors, dhts, strict=True)
    ]
    try:
        found = [_round(averagers) for _ in range(rounds)]
        with averagers[0].get_tensors() as (averaged,):
            error = float((averaged - mean).norm() / mean.norm())
        if error > LARGEST_ERROR:
            raise RuntimeError(f"what came out is not the mean: relative error {error:.2f}")
    finally:
        for process in (*averagers, *dhts):
            process.shutdown()
    return {"seconds": median(one[0] for one in found), "cpu": median(one[1] for one in found)}


def _round(averagers: list[Any]) -> tuple[float, float]:
    controls = [averager.step(wait=False, require_trigger=True, timeout=60) for averager in averagers]
    while any(control.stage != AveragingStage.AWAITING_TRIGGER for control in controls):
        if any(control.done() for control in controls):
            raise RuntimeError("the averagers did not meet")
        time.sleep(0.01)
    cpu, start = cpu_seconds(), time.perf_counter()
    for control in controls:
        control.allow_allreduce()
    for control in controls:
        control.result(timeout=60)
    return time.perf_counter() - start, cpu_seconds() - cpu


def cpu_seconds() -> float:
    """Of this process and all that it has started."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


if __name__ == "__main__":
    main()
