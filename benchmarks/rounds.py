"""A certified round of 25 M numbers with 2 and 4 members on loopback, beside hivemind's averager in the same run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from benchmarks.hivemind_process import hivemind_facts
from benchmarks.record import Report, Row
from benchmarks.sizes import size

ROUNDS = size(3, 1)
MEMBERS = size((2, 4), (2,))
HIVEMIND_CODECS = ("fp32", "fp16", "8 bits")
GOALS: Mapping[str, float] = {"int8": 1.2, "fp32": 0.8}  # times hivemind's speed with its fastest codec


class _Peer:
    def __init__(self, number: int, folder: str) -> None:
        command = [sys.executable, "-m", "benchmarks.round_peer", str(number), folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self.answer()

    def order(self, order: Mapping[str, Any]) -> None:
        if self.process.stdin is None:
            raise RuntimeError("a peer without an input")
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = "" if self.process.stdout is None else self.process.stdout.readline()
        if not line:
            raise RuntimeError("a peer of the round has ended")
        return dict(json.loads(line))


@contextmanager
def _peers(count: int) -> Iterator[Sequence[_Peer]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        peers = list[_Peer]()
        for number in range(count):
            peer = _Peer(number + 1, folder)
            peers.append(peer)
            ends.callback(peer.process.wait)
            ends.callback(peer.process.kill)  # a peer whose round has failed may not listen
        for number, peer in enumerate(peers):
            others = [other.facts for other in peers if other is not peer]
            peer.order({"peers": others if number else []})
            peer.answer()
            if not number:  # the others connect to the first, which learns of them so
                continue
        peers[0].order({"peers": [other.facts for other in peers[1:]]})
        peers[0].answer()
        yield peers


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
    notes.append(
        f"Medians of {ROUNDS} rounds of 25 M numbers, the slowest member's seconds; CPU seconds of all processes. Ours "
        "encode, sum, judge, reduce every slice once, as friends do, vote twice with an fsync each and decode; "
        "hivemind's matchmaking is not counted, our intents and proposal are."
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
    with _peers(members) as peers:
        for number in range(ROUNDS + 1):
            for place, codec in enumerate(GOALS):
                for peer in peers:
                    peer.order({"round": 10 * number + place, "codec": codec})
                told = [peer.answer() for peer in peers]
                if len({one["value"] for one in told}) != 1:
                    raise RuntimeError("the members of a round came to different values")
                if number:  # the first one makes the connections
                    found[codec].append(
                        {
                            "seconds": max(one["seconds"] for one in told),
                            "cpu": sum(one["cpu"] for one in told),
                            "bytes": max(one["bytes"] for one in told) / told[0]["encoded"],
                        }
                    )
    return {
        codec: {name: median(one[name] for one in rounds) for name in ("seconds", "cpu", "bytes")}
        for codec, rounds in found.items()
    }


def _row(members: int, codec: str, ours: Mapping[str, float], theirs: Mapping[str, Mapping[str, Any]]) -> Row:
    figure = f"{ours['seconds']:.2f} s, {ours['cpu']:.2f} CPU-s, a member sends {ours['bytes']:.2f} contributions"
    names = [name for name in theirs if codec in ("int8", name)]
    if not names:
        return Row(f"{members} members, {codec}", figure, "beside hivemind", None)
    best = min(names, key=lambda name: theirs[name]["seconds"])
    ratio, goal = theirs[best]["seconds"] / ours["seconds"], GOALS[codec]
    what = f"{figure}; {ratio:.2f} times hivemind's speed ({best})"
    return Row(f"{members} members, {codec}", what, f">= {goal:g} times hivemind's", ratio >= goal)


def _hivemind_row(members: int, name: str, facts: Mapping[str, Any]) -> Row:
    figure = f"{facts['seconds']:.2f} s, {facts['cpu']:.2f} CPU-s"
    return Row(f"{members} peers, hivemind 1.1.12, {name}", figure, "report", None)
