"""A certified round of 25 M numbers with 2 and 4 members on loopback, beside hivemind's averager in the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from statistics import median
from typing import Any

from benchmarks.hivemind_process import hivemind_facts
from benchmarks.record import Report, Row
from benchmarks.sizes import size

ROUNDS = size(3, 1)
MEMBERS = size((2, 4), (2,))
STRANGERS = size(4, 3)  # of two members each reduces all slices, so that none is left to audit
LONGEST_SECONDS = 300  # between two answers of a peer
HIVEMIND_CODECS = ("fp32", "fp16", "8 bits")
GOALS: Mapping[str, float] = {"int8": 1.2, "fp32": 0.8}  # times hivemind's speed with its fastest codec


class Peer:
    """A process that says one JSON object, and one more for each that it is given: of ours, or one of hivemind's."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def order(self, order: Mapping[str, Any]) -> None:
        """What to do next; `answer` returns what came of it."""
        if self._process.stdin is None:
            raise RuntimeError("a peer without an input")
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next object. Raises RuntimeError if the process has ended or does not answer."""
        too_late = threading.Timer(LONGEST_SECONDS, self.kill)  # its end is the end of its output
        too_late.start()
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        too_late.cancel()
        if not line:
            raise RuntimeError("a peer of the round has ended, or did not answer")
        return dict(json.loads(line))

    def kill(self) -> None:
        """End it with all that it has started: a peer whose round has failed may not listen."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def running(commands: Iterable[Sequence[str]]) -> Generator[Sequence[Peer]]:
    """A peer for each command. All are killed in the end."""
    with ExitStack() as ends:
        peers = list[Peer]()
        for command in commands:
            peers.append(Peer(command))
            ends.callback(peers[-1].kill)
        yield peers


@contextmanager
def our_peers(places: Sequence[tuple[Sequence[str], str]]) -> Generator[Sequence[Peer]]:
    """Connected members of a round. Each has a prefix for its command, and the address at which it listens."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [*prefix, sys.executable, "-m", "benchmarks.round_peer", str(number), folder, address]
            for number, (prefix, address) in enumerate(places, 1)
        ]
        with running(commands) as peers:
            facts = [peer.answer() for peer in peers]
            for place, peer in enumerate(peers):
                peer.order({"peers": facts[:place] + facts[place + 1 :]})
                peer.answer()
            yield peers


def one_round(
    peers: Sequence[Peer], number: int, codec: str, *, are_strangers: bool = False, audits: bool = True
) -> Mapping[str, float]:
    """The seconds of the slowest member, the CPU seconds of all, and the most contributions that one of them sent."""
    for peer in peers:
        peer.order({"round": number, "codec": codec, "strangers": are_strangers, "audits": audits})
    told = [peer.answer() for peer in peers]
    if len({one["value"] for one in told}) != 1:
        raise RuntimeError("the members of a round came to different values")
    return {
        "seconds": max(one["seconds"] for one in told),
        "cpu": sum(one["cpu"] for one in told),
        "bytes": max(one["bytes"] for one in told) / told[0]["encoded"],
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The median of each figure."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def measure() -> Report:
    """$BENCHMARK_HIVEMIND_PYTHON is a Python that has hivemind 1.1.12."""
    rows, notes = list[Row](), list[str]()
    for members in MEMBERS:
        ours = _ours(members)
        told = {
            name: hivemind_facts("benchmarks.hivemind_averager", members, ROUNDS, number)
            for number, name in enumerate(HIVEMIND_CODECS)
        }
        theirs = {name: facts for name, facts in told.items() if not isinstance(facts, str)}
        notes += [f"{members} peers, {name}: {why}" for name, why in told.items() if isinstance(why, str)]
        rows += [_row(members, codec, ours[codec], theirs) for codec in GOALS]
        rows += [_hivemind_row(members, name, facts) for name, facts in theirs.items()]
    rows.append(_audits_row())
    notes.append(
        f"Medians of {ROUNDS} rounds of 25 M numbers, the slowest member's seconds; CPU seconds of all processes. Ours "
        "encode, sum, judge, reduce every slice once, as friends do, vote twice with an fsync each and decode; "
        "hivemind's matchmaking is not counted, our intents and proposal are. The audits of strangers: each seat "
        "computes one slice again from its parts, and each member the norms of its own contribution."
    )
    notes.append(
        "Both cores are full. With 4 members and int8, before slices were named by BLAKE3, NumPy and PyTorch took 36 % "
        "of the processor time (sums in float64, twice), the interpreter 23 %, the kernel 22 % (copies, and fresh "
        "memory, 0.4 ms a megabyte on this machine), TLS and SHA-256 8 %, BLAKE3 4 %. What is left to gain is one "
        "pass over the codes in machine code instead of ten in NumPy, and nothing here brings a compiler."
    )
    return Report("rounds", "A certified round of 25 M numbers", tuple(rows), tuple(notes))


def _ours(members: int) -> Mapping[str, Mapping[str, float]]:
    found: dict[str, list[Mapping[str, float]]] = {codec: [] for codec in GOALS}
    with our_peers([((), "127.0.0.1")] * members) as peers:
        for number in range(ROUNDS + 1):
            for place, codec in enumerate(GOALS):
                of_round = one_round(peers, 10 * number + place, codec)
                if number:  # the first one makes the connections
                    found[codec].append(of_round)
    return {codec: medians(rounds) for codec, rounds in found.items()}


def _row(members: int, codec: str, ours: Mapping[str, float], theirs: Mapping[str, Mapping[str, Any]]) -> Row:
    figure = f"{ours['seconds']:.2f} s, {ours['cpu']:.2f} CPU-s, a member sends {ours['bytes']:.2f} contributions"
    names = [name for name in theirs if codec in ("int8", name)]
    if not names:
        return Row(f"{members} members, {codec}", figure, "beside hivemind", None)
    best = min(names, key=lambda name: theirs[name]["seconds"])
    ratio, goal = theirs[best]["seconds"] / ours["seconds"], GOALS[codec]
    what = f"{figure}; {ratio:.2f} times hivemind's speed ({best})"
    return Row(f"{members} members, {codec}", what, f">= {goal:g} times hivemind's", ratio >= goal)


def _audits_row() -> Row:
    """The cost of the audits of a round of strangers: rounds with and without them take turns."""
    found: dict[bool, list[Mapping[str, float]]] = {True: [], False: []}
    with our_peers([((), "127.0.0.1")] * STRANGERS) as peers:
        for number in range(ROUNDS + 1):
            for audits, rounds in found.items():
                of_round = one_round(peers, 10 * number + audits, "int8", are_strangers=True, audits=audits)
                if number:
                    rounds.append(of_round)
    audited, believed = medians(found[True]), medians(found[False])
    cpu, seconds = audited["cpu"] - believed["cpu"], audited["seconds"] - believed["seconds"]
    figure = (
        f"{cpu:.2f} of {audited['cpu']:.2f} CPU-s ({cpu / audited['cpu']:.0%}), {seconds:.2f} of "
        f"{audited['seconds']:.2f} s; a member sends {audited['bytes']:.2f} contributions, "
        f"{believed['bytes']:.2f} without audits"
    )
    return Row(f"{STRANGERS} strangers, int8, audits", figure, "report", None)


def _hivemind_row(members: int, name: str, facts: Mapping[str, Any]) -> Row:
    figure = f"{facts['seconds']:.2f} s, {facts['cpu']:.2f} CPU-s"
    return Row(f"{members} peers, hivemind 1.1.12, {name}", figure, "report", None)
