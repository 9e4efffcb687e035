"""Run by another Python that has hivemind: CPU seconds of a remote expert that gives a (4, 512, 1024) tensor back.

Prints one JSON object. All its processes listen on loopback only; nothing asks a router for a port.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import hivemind  # type: ignore[import-not-found]
import psutil
import torch
from hivemind.dht import DHT  # type: ignore[import-not-found]
from hivemind.moe.client.expert import RemoteExpert  # type: ignore[import-not-found]
from hivemind.moe.server.dht_handler import get_experts  # type: ignore[import-not-found]
from hivemind.moe.server.layers.custom_experts import register_expert_class  # type: ignore[import-not-found]
from hivemind.moe.server.server import background_server  # type: ignore[import-not-found]

from benchmarks.hivemind_loopback import LOOPBACK

SHAPE = (4, 512, 1024)
FIND_SECONDS = 60


@register_expert_class("echo", lambda batch_size, width: torch.empty((batch_size, SHAPE[1], width)))
class Echo(torch.nn.Module):
    """Gives its input back; the parameter is there because an expert must have one."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        return inputs


def main() -> None:
    """Argument: how many round trips."""
    count = int(sys.argv[1])
    options = {"expert_uids": ["echo.0"], "expert_cls": "echo", "hidden_dim": SHAPE[2], "device": "cpu"}
    with background_server(optim_cls=None, num_handlers=1, **options, **LOOPBACK) as server:
        dht = DHT(initial_peers=[str(address) for address in server.addrs], start=True, **LOOPBACK)
        expert = _found(dht)
        tensor = torch.randn(SHAPE)
        with torch.inference_mode():
            for _ in range(2):
                expert(tensor)
            cpu, start = _cpu_seconds(), time.perf_counter()
            for _ in range(count):
                answer = expert(tensor)
            seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
        if not torch.equal(answer, tensor):
            raise ValueError("the tensor came back changed")
        processes = len(_family())
        dht.shutdown()
    facts = {"cpu": cpu / count, "seconds": seconds / count, "processes": processes, "version": hivemind.__version__}
    print(json.dumps(facts), flush=True)


def _found(dht: Any) -> RemoteExpert:
    until = time.monotonic() + FIND_SECONDS
    while time.monotonic() < until:
        (expert,) = get_experts(dht, ["echo.0"])
        if expert is not None:
            return expert
        time.sleep(0.5)
    raise TimeoutError("the expert was not announced")


def _family() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def _cpu_seconds() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _family())


if __name__ == "__main__":
    main()
