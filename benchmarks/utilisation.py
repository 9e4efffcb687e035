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

from benchmarks.friends import befriend
from benchmarks.node_process import TOKEN, NodeProcess, running_node
from benchmarks.prepared_run import build_data
from benchmarks.record import NotHereError, Report, Row
from benchmarks.shaped_line import FAR_ADDRESS, NEAR_ADDRESS, Line, NoLineError, enter, shaped_line
from benchmarks.sizes import size
from neuroshard.config.run_parameters import CodecName, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.identity import SignedRunParameters, Wallet, parse_token
from neuroshard.model.architecture import parameter_count
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.types import Architecture

UP_MBIT, DOWN_MBIT, RTT_MS = 10, 100, 100
SHAPE = size((512, 8, 8, 8, 1368), (64, 2, 2, 1, 128))  # width, layers, heads, kv heads, feed-forward: 25 M
BATCH, LENGTH, VOCABULARY = 4, 64, 1024
ROUND_SECONDS = float(os.environ.get("BENCHMARK_ROUND_SECONDS", size(180, 30)))  # from the end of one to the next
START_SECONDS, LOOK_SECONDS, GOAL = size(120.0, 800.0), 1.0, 0.9
SETTLING_SECONDS, TAIL_SECONDS = size((20.0, 5.0), (1.0, 2.0))  # nodes meet; the end of a round is taken over
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
        rounds = tuple(reversed(self.ask(lambda: self.node.get("/api/rounds"))["rounds"]))
        self.looks.append(Look(time.time(), int(status["training"]["steps"]), rounds))
        return self.looks[-1]


@dataclass(frozen=True)
class Cost:
    """What a round has taken from the training of a replica."""

    round_seconds: float
    lost_seconds: float  # of training, at the speed before the round
    megabytes: float  # sent for it

    @staticmethod
    def of(looks: Sequence[Look]) -> Cost:
        """Of the first round that completed; the time until it began shows the speed without one."""
        told = next(one for one in looks[-1].rounds if one["certificate"] is not None)
        begun, ended = told["ended_at"] - told["seconds"], told["ended_at"] + TAIL_SECONDS
        before = _speed(looks, looks[0].at + SETTLING_SECONDS, begun)
        lost = (ended - begun) * (1 - _speed(looks, begun, ended) / before)
        return Cost(told["seconds"], lost, told["bytes_sent"] / 1e6)

    @property
    def utilisation(self) -> float:
        """Share of the time between two rounds' ends in which the replica trains."""
        return 1 - self.lost_seconds / (ROUND_SECONDS + self.round_seconds)


def measure(codec: str) -> Report:
    """A round in a codec, and the time before it. Raises NotHereError without a line."""
    try:
        looks = _looks(cast("CodecName", codec))
    except NoLineError as error:
        raise NotHereError(str(error)) from error
    rows = list[Row]()
    for name, of_node in zip(("first", "second"), looks, strict=True):
        cost = Cost.of(of_node)
        waiting = ROUND_SECONDS / (ROUND_SECONDS + cost.round_seconds)
        figure = (
            f"{cost.utilisation:.1%}: a round takes {cost.round_seconds:.0f} s and {cost.megabytes:.0f} MB up, and "
            f"costs {cost.lost_seconds:.1f} s of training; {waiting:.0%} if training stopped for it"
        )
        rows.append(Row(f"{codec}, {name} replica", figure, f">= {GOAL:.0%}", cost.utilisation >= GOAL))
    title = f"Compute utilisation over a home's line, {codec}"
    return Report(f"utilisation_{codec}", title, tuple(rows), (_conditions(),))


def _looks(codec: CodecName) -> list[list[Look]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        line = stack.enter_context(shaped_line(UP_MBIT, RTT_MS, 0.0))
        owner = Wallet.from_secret(parse_token(TOKEN))
        offer = RunOffer.of_new_run(SignedRunParameters.sign(owner, _parameters(folder / "genesis", codec)))

        def start(number: int, peers: Sequence[str], place: Sequence[str]) -> NodeProcess:
            data_dir = folder / f"node-{number}"
            data_dir.mkdir()
            JoinedRuns(data_dir).keep(offer)
            token = f"{number:02x}" * 32 if number else TOKEN  # the owner's node founds the run
            befriend(data_dir, offer, Wallet.from_secret(parse_token(token)).public_key, owner)
            arguments = ["--run", offer.run_id, "--genesis", str(folder / "genesis"), "--cpu-threads", "1", *PEERS]
            address = (NEAR_ADDRESS, FAR_ADDRESS)[number]
            variables = {"NEUROSHARD_TOKEN": token, "NEUROSHARD_P2P_HOST": address}
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
    """What the nodes tell until a round has completed, and a little longer. Raises TimeoutError."""
    deadline = time.monotonic() + START_SECONDS + 2 * ROUND_SECONDS
    last: float | None = None
    while last is None or time.monotonic() < last:
        told = [node.look() for node in nodes]
        if last is None and all(any(one["certificate"] is not None for one in look.rounds) for look in told):
            last = time.monotonic() + 2 * TAIL_SECONDS
        if time.monotonic() > deadline:
            raise TimeoutError(f"no round completed; told at last: {told}")
        time.sleep(LOOK_SECONDS)
    return [node.looks for node in nodes]


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
        outer=OuterOptimization(
            inner_steps=10_000, interval="fixed", codec=codec, max_round_seconds=ROUND_SECONDS, overlap=True
        ),
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
        f"{ROUND_SECONDS:.0f} s after the one before and goes on beside the training. What it costs is told by the "
        f"steps from its beginning to {TAIL_SECONDS:.0f} s after its end, beside those before it: encoding, sums, TLS "
        "and the vote on held-out data take theirs from the same core. Utilisation: of the time from one round's end "
        "to the next one's."
    )
