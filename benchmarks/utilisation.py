"""How much of its time a replica trains whose rounds cross a home's line: two real nodes, rounds by the clock."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from benchmarks.node_process import TOKEN, NodeProcess, running_node
from benchmarks.prepared_run import build_data
from benchmarks.record import NotHereError, Report, Row
from benchmarks.shaped_line import FAR_ADDRESS, NEAR_ADDRESS, Line, NoLineError, enter, shaped_line
from neuroshard.config.run_parameters import CodecName, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.identity import SignedRunParameters, Wallet, parse_token
from neuroshard.model.family import parameter_count
from neuroshard.node.joined_runs import JoinedRuns
from neuroshard.swarm.run_offer import RunOffer
from neuroshard.types import Architecture

UP_MBIT, DOWN_MBIT, RTT_MS = 10, 100, 100
SHAPE = (512, 8, 8, 8, 1368)  # width, layers, heads, key/value heads, feed-forward: 25 M parameters
BATCH, LENGTH, VOCABULARY = 4, 64, 1024
ROUND_SECONDS = float(os.environ.get("BENCHMARK_ROUND_SECONDS", "180"))  # from the end of one to the next
START_SECONDS, LOOK_SECONDS, SETTLED_SECONDS, GOAL = 120.0, 1.0, 5.0, 0.9
PEERS = ("--no-port-mapping", "--no-lan-discovery", "--no-relay")
T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """What a node told at a time."""

    at: float  # seconds since the epoch
    steps: int
    rounds: tuple[dict[str, Any], ...]  # that have ended, the newest last


class HomeNode:
    """A node at one end of the line, asked by a thread that is there."""

    def __init__(self, stack: ExitStack, line: Line, name: str, start: Callable[..., NodeProcess]) -> None:
        self._there = stack.enter_context(ThreadPoolExecutor(1, initializer=enter, initargs=(name,)))
        self.node = start(place=line.inside(name))
        self.looks = list[Look]()

    def ask(self, work: Callable[[], T]) -> T:
        """The value of `work`, whose connections begin at the node's end of the line."""
        return self._there.submit(work).result()

    def wait_for_steps(self, steps: int) -> None:
        """Until it has made so many. Raises TimeoutError."""
        self.ask(lambda: self.node.wait_for_steps(steps, START_SECONDS))

    def look(self) -> Look:
        """How it stands now."""
        status = self.ask(lambda: self.node.get("/api/status"))
        stages = self.ask(lambda: self.node.get("/api/rounds"))["stages"]
        rounds = tuple(one for stage in stages for one in stage["recent"])
        self.looks.append(Look(time.time(), int(status["training"]["steps"]), rounds))
        return self.looks[-1]


@dataclass(frozen=True)
class Period:
    """A replica's time from the end of one round to the end of the next one."""

    seconds: float
    round_seconds: float
    utilisation: float  # steps, as a share of those that it would have made at the speed between the two rounds
    megabytes: float  # sent for the round

    @staticmethod
    def of(looks: Sequence[Look]) -> Period:
        """Of the first two rounds that completed."""
        first, second = [one for one in looks[-1].rounds if one["certificate"] is not None][:2]
        begun = second["ended_at"] - sum(second["seconds"].values())
        whole = _speed(looks, first["ended_at"], second["ended_at"])
        between = _speed(looks, first["ended_at"] + SETTLED_SECONDS, begun)
        seconds = second["ended_at"] - first["ended_at"]
        return Period(seconds, second["ended_at"] - begun, whole / between, second["bytes_sent"] / 1e6)


def measure(codec: str) -> Report:
    """Two rounds in a codec; the second one and the time before it count. Raises NotHereError without a line."""
    try:
        looks = _looks(cast("CodecName", codec))
    except NoLineError as error:
        raise NotHereError(str(error)) from error
    periods = [Period.of(of_node) for of_node in looks]
    rows = list[Row]()
    for name, one in zip(("first", "second"), periods, strict=True):
        stopped = 1 - one.round_seconds / one.seconds
        figure = (
            f"{one.utilisation:.1%}; a round took {one.round_seconds:.0f} s of {one.seconds:.0f} s and "
            f"{one.megabytes:.0f} MB up: {stopped:.0%} if training had stopped for it"
        )
        rows.append(Row(f"{codec}, {name} replica", figure, f">= {GOAL:.0%}", one.utilisation >= GOAL))
    title = f"Compute utilisation over a home's line, {codec}"
    return Report(f"utilisation_{codec}", title, tuple(rows), (_conditions(),))


def _looks(codec: CodecName) -> list[list[Look]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        line = stack.enter_context(shaped_line(UP_MBIT, RTT_MS, 0.0))
        offer = RunOffer.of_new_run(
            SignedRunParameters.sign(Wallet.from_secret(parse_token(TOKEN)), _parameters(folder / "genesis", codec))
        )

        def start(number: int, peers: Sequence[str], place: Sequence[str]) -> NodeProcess:
            data_dir = folder / f"node-{number}"
            JoinedRuns(data_dir).keep(offer)
            arguments = ["--run", offer.run_id, "--genesis", str(folder / "genesis"), "--cpu-threads", "1", *PEERS]
            address = (NEAR_ADDRESS, FAR_ADDRESS)[number]
            variables = {"NEUROSHARD_TOKEN": f"{number + 1:02x}" * 32, "NEUROSHARD_P2P_HOST": address}
            return stack.enter_context(running_node(data_dir, [*arguments, *peers], variables=variables, place=place))

        near = HomeNode(stack, line, line.near, partial(start, 0, ()))
        near.wait_for_steps(1)
        (address, *_) = near.ask(lambda: near.node.get("/api/status"))["network"]["addresses"]
        line.switch(is_on=False)  # who has trained already fetches no state: both begin with the run's weights
        far = HomeNode(stack, line, line.far, partial(start, 1, ("--peer", address)))
        far.wait_for_steps(1)
        line.switch(is_on=True)
        return _watched((near, far))


def _watched(nodes: Sequence[HomeNode]) -> list[list[Look]]:
    """What the nodes tell until two rounds have completed. Raises TimeoutError."""
    deadline = time.monotonic() + START_SECONDS + 4 * ROUND_SECONDS
    while time.monotonic() < deadline:
        told = [node.look() for node in nodes]
        if all(sum(one["certificate"] is not None for one in look.rounds) >= 2 for look in told):
            return [node.looks for node in nodes]
        time.sleep(LOOK_SECONDS)
    raise TimeoutError(f"two rounds did not complete; told at last: {[node.looks[-1] for node in nodes]}")


def _parameters(genesis: Path, codec: CodecName) -> RunParameters:
    pins, ids = build_data(genesis, VOCABULARY)
    return RunParameters(
        name="benchmark",
        version=1,
        architecture=Architecture(*SHAPE, ids, LENGTH),
        stage_count=1,
        batch_size=BATCH,
        sequences_per_step=BATCH,
        initial_weights_seed=1,
        genesis=pins,
        inner=InnerOptimization(learning_rate=3e-4),
        outer=OuterOptimization(inner_steps=10_000, codec=codec, max_round_seconds=ROUND_SECONDS, overlap=True),
    )


def _speed(looks: Sequence[Look], begun: float, ended: float) -> float:
    """Steps a second between two times; of a step that is cut by one of them a share counts."""
    return (_steps_at(looks, ended) - _steps_at(looks, begun)) / (ended - begun)


def _steps_at(looks: Sequence[Look], at: float) -> float:
    before = max((look for look in looks if look.at <= at), key=lambda look: look.at)
    after = min((look for look in looks if look.at > at), key=lambda look: look.at, default=before)
    if after.at == before.at:
        return before.steps
    return before.steps + (after.steps - before.steps) * (at - before.at) / (after.at - before.at)


def _conditions() -> str:
    count = parameter_count(Architecture(*SHAPE, VOCABULARY, LENGTH))
    return (
        f"Two nodes with all their parts, each in a network namespace, {count / 1e6:.1f} M parameters, one thread each "
        f"on two cores; between them an emulated line of {UP_MBIT} Mbit/s either way and {RTT_MS} ms there and back: "
        f"what two homes of {UP_MBIT} Mbit/s up and {DOWN_MBIT} Mbit/s down give each other. A round is due "
        f"{ROUND_SECONDS:.0f} s after the one before and goes on beside the training. Utilisation: steps from the end "
        "of the first round to the end of the second, as a share of those at the speed between the two; encoding, "
        "sums, TLS and the vote on held-out data take theirs from the same core."
    )
