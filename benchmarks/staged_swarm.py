"""Nodes on loopback that hold a model in stages, started for a benchmark."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.friends import befriend
from benchmarks.node_process import TOKEN, NodeProcess, running_node
from benchmarks.sizes import size
from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.identity import SignedRunParameters, Wallet, parse_token
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_runs import JoinedRuns, LocalRuns
from neuroshard.types import Architecture

START_SECONDS = size(180.0, 800.0)


@dataclass(frozen=True, eq=False)
class Member:
    """A node and how it is started again."""

    node: NodeProcess
    number: int

    @property
    def status(self) -> dict[str, Any]:
        """GET /api/status."""
        return self.node.get("/api/status")

    @property
    def stage_start(self) -> int | None:
        """The first layer that it holds; None while it has none."""
        try:
            layers = self.status["layers"]
        except httpx.HTTPError:
            return None
        return None if layers is None else int(layers["start"])


def staged_parameters(
    pins: GenesisPins,
    architecture: Architecture,
    *,
    stages: int,
    batch_size: int,
    microbatches: int,
    routing: Literal["lanes", "balanced"] = "lanes",
) -> RunParameters:
    """A run whose steps are made of so many microbatches."""
    return RunParameters(
        name="benchmark",
        version=1,
        architecture=architecture,
        stage_count=stages,
        batch_size=batch_size,
        sequences_per_step=batch_size * microbatches,
        initial_weights_seed=1,
        genesis=pins,
        inner=InnerOptimization(learning_rate=1e-3),
        outer=OuterOptimization(inner_steps=10_000, interval="fixed"),
        routing=routing,
    )


def keep_own_run(data_dir: Path, parameters: RunParameters) -> None:
    """A node with the benchmark's token finds this run in its data folder."""
    LocalRuns(data_dir, Wallet.from_secret(parse_token(TOKEN))).create(parameters)


class StagedSwarm:
    """Starts members one after the other; the first one's address is everybody's peer."""

    def __init__(self, folder: Path, parameters: RunParameters, genesis: Path, *, has_owner: bool = False) -> None:
        """`has_owner`: member 0 has the wallet of the owner, whose node founds the run. Others alone make no round."""
        self._folder = folder
        self._has_owner = has_owner
        self._genesis = genesis
        self._offer = RunOffer.of_new_run(SignedRunParameters.sign(Wallet.from_secret(parse_token(TOKEN)), parameters))
        self._addresses: dict[int, str] = {}
        self._stack = ExitStack()

    def start(self, number: int, *, threads: int = 1, memory_mb: int | None = None) -> Member:
        """Start a member, or start it again in its folder, and wait until it has chosen its layers."""
        node = self.launch(number, threads=threads, memory_mb=memory_mb)
        self.learn_address(number, node)
        node.wait_for("layers", lambda status: status["layers"] is not None, START_SECONDS)
        return Member(node, number)

    def learn_address(self, number: int, node: NodeProcess) -> None:
        """Wait until a member can be reached, and tell its address to those that are launched afterwards."""
        status = node.wait_for("address", lambda status: bool(status["network"]["addresses"]), START_SECONDS)
        self._addresses[number] = status["network"]["addresses"][0]

    def launch(
        self,
        number: int,
        *,
        threads: int = 1,
        memory_mb: int | None = None,
        place: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> NodeProcess:
        """Start a member's process, at an address of this computer; it knows the addresses learned before.

        `place` stands before its command.
        """
        data_dir = self._folder / f"member-{number}"
        data_dir.mkdir(parents=True, exist_ok=True)
        JoinedRuns(data_dir).keep(self._offer)
        token = TOKEN if self._has_owner and number == 0 else f"{number + 1:02x}" * 32
        wallet = Wallet.from_secret(parse_token(token)).public_key
        befriend(data_dir, self._offer, wallet, Wallet.from_secret(parse_token(TOKEN)))
        peers = [part for other, address in self._addresses.items() if other != number for part in ("--peer", address)]
        arguments = ["--run", self._offer.run_id, "--genesis", str(self._genesis), "--max-stages", "1"]
        arguments += ["--cpu-threads", str(threads), *peers]
        arguments += [] if memory_mb is None else ["--memory", str(memory_mb)]
        variables = {"NEUROSHARD_TOKEN": token, "NEUROSHARD_P2P_HOST": host}
        return self._stack.enter_context(running_node(data_dir, arguments, variables=variables, place=place))

    def close(self) -> None:
        """Stop all."""
        self._stack.close()


@contextmanager
def staged_swarm(
    folder: Path, parameters: RunParameters, genesis: Path, *, has_owner: bool = False
) -> Generator[StagedSwarm]:
    """A swarm without members; all are gone when the block ends."""
    swarm = StagedSwarm(folder, parameters, genesis, has_owner=has_owner)
    try:
        yield swarm
    finally:
        swarm.close()


def wait_until_trained(members: Sequence[Member], steps: int) -> None:
    """Wait until every member has made so many steps. Raises TimeoutError."""
    deadline = time.monotonic() + START_SECONDS
    while any(member.status["training"]["steps"] < steps for member in members):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the swarm did not make {steps} steps within {START_SECONDS} s")
        time.sleep(0.2)


def driver_of(members: Sequence[Member]) -> Member:
    """The first one that drives."""
    return next(member for member in members if member.stage_start == 0)


def alone(parameters: RunParameters) -> RunParameters:
    """The same run in one piece."""
    return replace(parameters, stage_count=1)
