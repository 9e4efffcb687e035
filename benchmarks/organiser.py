"""A thousand joiners at a real organiser, which is killed ten times: the time of an answer, double places, and order.

Joiners come evenly, each with keys of its own and from one of 500 networks. They come one after the other, so that the
order is known. Each one that waits asks once for its place, at the same time as later ones join. The load is that of an
hour with 1,000 joiners that ask again every ten seconds, for some minutes. Clients and organiser share this computer.
"""

from __future__ import annotations

import secrets
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.node_process import free_port
from benchmarks.organiser_process import OrganiserProcess, running_organiser
from benchmarks.record import Report, Row, load_average
from benchmarks.sizes import size
from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.identity import (
    Delegation,
    NodeIdentity,
    NodeKey,
    SignedRunParameters,
    TokenSecret,
    Wallet,
    sign_claim,
)
from neuroshard.identity.admissions import JOIN, JoinClaim
from neuroshard.runs.authority_key import load_or_create_authority_key
from neuroshard.runs.creation import write_offer
from neuroshard.runs.offer import RunOffer
from neuroshard.types import Architecture

JOINERS = size(1000, 30)
REQUESTS_PER_SECOND = size(5.0, 30.0)
KILLS = size(10, 2)
PLACES = size(100, 3)  # per stage, of three
POLLING = size(20, 3)  # joiners that ask for their place in the queue between two joins are among the last ones
GOAL_SECONDS = 0.1
RETRY_SECONDS = 0.05
LONGEST_SECONDS = 30.0
STAGES = 3
SHAPE = Architecture(64, STAGES, 2, 1, 128, 512, 32)


@dataclass
class Seen:
    """The answers so far, in the order of the joins."""

    seconds: list[float] = field(default_factory=list[float])  # of answers without a kill in between
    interrupted: int = 0
    places: dict[int, dict[str, Any]] = field(default_factory=dict[int, "dict[str, Any]"])


class Joiners:
    """Sends claims to an organiser that is killed now and then."""

    def __init__(self, offer: RunOffer, http: httpx.Client) -> None:
        self.seen = Seen()
        self.url = ""
        self.is_up = threading.Event()
        self._offer = offer
        self._http = http

    def join(self, number: int) -> None:
        """Join as a node until the organiser has answered, with a new claim for each try."""
        line = f"{16 + number % 50}.{number // 50 % 10}.0.7"  # each /16 may join forty times per minute
        identity, headers = identity_of(number), {"X-Forwarded-For": line}

        def ask() -> httpx.Response:
            return self._http.put(f"{self.url}/api/join", content=claim(), headers=headers)

        def claim() -> bytes:
            wanted = JoinClaim(self._offer.run_id, memory_mb=16_000)
            return sign_claim(identity, JOIN, wanted, time.time()).encode()

        self.seen.places[number] = self._answered(ask)

    def poll(self, number: int) -> None:
        """Ask for the place in the queue, if the joiner is there."""
        known = self.seen.places.get(number)
        if known is None or known["status"] == "admitted":
            return
        question = {name: known[name] for name in ("request_id", "session_token")}
        self.seen.places[number] = self._answered(
            lambda: self._http.put(f"{self.url}/api/authorization_status", json=question)
        )

    def _answered(self, ask: Any) -> dict[str, Any]:
        deadline, tries = time.monotonic() + LONGEST_SECONDS, 0
        while True:
            self.is_up.wait(LONGEST_SECONDS)
            began = time.perf_counter()
            try:
                answer = ask()
            except httpx.TransportError:
                tries += 1
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)
                continue
            if answer.status_code not in {200, 202}:
                raise RuntimeError(f"the organiser answered {answer.status_code}: {answer.text[:300]}")
            if tries == 0:
                self.seen.seconds.append(time.perf_counter() - began)
            else:
                self.seen.interrupted += 1
            return answer.json()


def identity_of(number: int) -> NodeIdentity:
    """A joiner with its own wallet and node key, the same in every run."""
    wallet = Wallet.from_secret(TokenSecret("hex", (number + 1).to_bytes(32, "big")))
    key = NodeKey.from_seed((number + 1).to_bytes(32, "little"))
    delegation = Delegation.issue(wallet, key.public_key, time.time() + 86_400)
    return NodeIdentity(wallet.wallet_id, key.node_id, key, delegation)


def measure() -> Report:
    """Run the load and compare with the goals."""
    with tempfile.TemporaryDirectory() as name, httpx.Client(timeout=LONGEST_SECONDS, trust_env=False) as http:
        folder = Path(name)
        offer = _run_in(folder)
        joiners = Joiners(offer, http)
        began = time.monotonic()
        _play(folder, joiners)
        took = time.monotonic() - began
        double, wrong = _doubles(folder), _out_of_order(joiners.seen)
    seen = joiners.seen
    seconds = sorted(seen.seconds)
    p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    asked = len(seconds) + seen.interrupted
    return Report(
        "organiser",
        f"{JOINERS:,} joiners at a real organiser, killed {KILLS} times",
        (
            Row("p99 of an answer", f"{1000 * p99:.0f} ms", f"< {1000 * GOAL_SECONDS:.0f} ms", p99 < GOAL_SECONDS),
            Row("median of an answer", f"{1000 * seconds[len(seconds) // 2]:.1f} ms", "to report", None),
            Row("places given twice, or stages with too many", str(double), "0", double == 0),
            Row("joiners out of order", str(wrong), "0", wrong == 0),
            Row("joiners without an answer", str(JOINERS - len(seen.places)), "0", len(seen.places) == JOINERS),
            Row("requests per second", f"{asked / took:.1f}", f">= {REQUESTS_PER_SECOND:g}", None),
        ),
        (
            f"{asked:,} requests in {took:.0f} s. {seen.interrupted} of them met a killed organiser and were repeated.",
            "Repeated requests are not in the median and the p99.",
            f"Load average: {load_average()}.",
        ),
    )


def _play(folder: Path, joiners: Joiners) -> None:
    """Send the joins at their pace, and kill and restart the organiser evenly in between."""
    kill_after = {JOINERS * (each + 1) // (KILLS + 1) for each in range(KILLS)}
    port = free_port()
    started = _Restarted(folder, joiners, port)
    try:
        started.start()
        with ThreadPoolExecutor(16) as pool:
            begun = time.monotonic()
            waits: list[Any] = []
            for number in range(JOINERS):
                time.sleep(max(0.0, begun + number / REQUESTS_PER_SECOND - time.monotonic()))
                waits[:] = [each for each in waits if not each.done() or each.result()]
                joiners.join(number)  # one after the other, so that the order is known
                if number >= POLLING:
                    waits.append(pool.submit(joiners.poll, number - POLLING))
                if number in kill_after:
                    started.restart()
            for each in waits:
                each.result()
    finally:
        started.stop()


class _Restarted:
    """An organiser on one port that is killed and started again."""

    def __init__(self, folder: Path, joiners: Joiners, port: int) -> None:
        self._folder, self._joiners, self._port = folder, joiners, port
        self._running: Any = None
        self._process: OrganiserProcess | None = None

    def start(self) -> None:
        capacity = self._folder / "capacity.toml"
        arguments = ["--listen", f"127.0.0.1:{self._port}", "--capacity", str(capacity)]
        self._running = running_organiser(self._folder, self._folder / "run.json", arguments)
        self._process = self._running.__enter__()
        assert self._process is not None
        self._joiners.url = self._process.url
        self._joiners.is_up.set()

    def stop(self) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)

    def restart(self) -> None:
        """The power cut, while requests of waiting joiners are under way."""
        assert self._process is not None
        self._process.kill()
        self._joiners.is_up.clear()
        self.stop()
        self.start()


def _run_in(folder: Path) -> RunOffer:
    key = load_or_create_authority_key(folder).public_key.hex()
    parameters = RunParameters("load", 1, SHAPE, STAGES, 1, 4, 7, GenesisPins("ab" * 32, 16, None, "ef" * 32, 512))
    owner = Wallet.from_secret(TokenSecret("hex", secrets.token_bytes(32)))
    signed = SignedRunParameters.sign(owner, replace(parameters, admission="admitted", authority=(key,)))
    offer = RunOffer.of_new_run(signed)
    write_offer(offer, folder / "run.json")
    (folder / "capacity.toml").write_text(f"replicas = {PLACES}\n", encoding="utf-8")
    return offer


def _doubles(folder: Path) -> int:
    """Nodes with two places or in the queue as well, and places beyond the capacity of a stage."""
    (path,) = folder.glob("organiser/*/organiser.sqlite")
    with closing(sqlite3.connect(path)) as database:
        held: Sequence[tuple[str, str]] = database.execute("SELECT node, stage FROM places").fetchall()
        waiting = {row[0] for row in database.execute("SELECT node FROM queue")}
    nodes = Counter(node for node, _ in held)
    beyond = sum(max(0, count - PLACES) for count in Counter(stage for _, stage in held).values())
    return sum(count - 1 for count in nodes.values()) + len(waiting & nodes.keys()) + beyond


def _out_of_order(seen: Seen) -> int:
    """Joiners that got a place although an earlier one did not: nobody leaves, and every node fits every stage."""
    admitted = [number for number, answer in sorted(seen.places.items()) if answer["status"] == "admitted"]
    return sum(number != expected for expected, number in enumerate(admitted))
