"""Real replicas that copy the contribution of an honest one, exactly or nearly: together they count as one member."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from neuroshard.network import InMemoryNetwork
from tests.worlds.replicas import DUE_SECONDS, EVERYBODY, LENGTH, SimulatedReplica, for_seconds, play

SEATS = EVERYBODY[:16]
MIMICS = 4


@dataclass
class Contributor(SimulatedReplica):
    """Contributes a vector that the test chooses."""

    vector: Tensor = field(default_factory=lambda: torch.zeros(LENGTH))

    async def take_part(self) -> None:
        self.weights = self.state.anchor - self.vector
        await super().take_part()


def test_four_mimics_among_sixteen_count_as_the_member_that_they_copy() -> None:
    random = torch.Generator().manual_seed(3)

    def some(size: float) -> Tensor:
        return size * torch.randn(LENGTH, generator=random)

    common = some(0.01)
    honest = [common + some(0.012) for _ in range(len(SEATS) - MIMICS)]
    copied = honest[0]
    vectors = [*honest, copied, copied, copied + some(0.0005), copied + some(0.0005)]

    async def scenario(network: InMemoryNetwork) -> None:
        replicas = [
            Contributor(name, network, seed, seats=SEATS, is_open=True, vector=vector)
            for seed, (name, vector) in enumerate(zip(SEATS, vectors, strict=True))
        ]
        await for_seconds(DUE_SECONDS + 5, *replicas)
        chain = replicas[0].group.chain.chain
        assert chain is not None
        (certificate,) = chain.recent
        assert len(certificate.value.accepted) == len(SEATS)  # nobody is refused: the bytes do not show who copied
        aggregate = -replicas[0].state.anchor
        mean = torch.stack(honest).mean(0)
        direction = copied - mean
        scale = (aggregate @ mean) / (mean @ mean)  # of the first outer step
        share = float((aggregate / scale - mean) @ direction / (direction @ direction))
        assert abs(share) < 0.06  # 0.25 if each counted

    play(scenario)
