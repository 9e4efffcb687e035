"""How fast tensors go from one home to another: through a hole in both routers, or through a relay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.bulk_processes import bulk_pair
from benchmarks.line_speed import CONDITIONS, CUBIC, LINE_MBIT, Condition
from benchmarks.record import NotHereError, Report, Row
from benchmarks.shaped_line import PUBLIC_ADDRESS, Home, NoLineError, homes_behind_routers, separate
from benchmarks.sizes import size

SECONDS = float(os.environ.get("BENCHMARK_SHAPED_SECONDS", size(20, 0.5)))
ASK_SECONDS = 900


@dataclass(frozen=True)
class _Speed:
    first: float  # Mbit/s
    later: float
    connections: int


def measure(way: str) -> Report:
    """A row for each line; `way` is "punched" or "relayed". Raises NotHereError where no line can be made."""
    rows = list[Row]()
    for condition in CONDITIONS:
        try:
            rows.extend(_punched_rows(condition) if way == "punched" else _relayed_rows(condition))
        except NoLineError as error:
            raise NotHereError(str(error)) from error
    note = (
        f"Two homes behind routers that filter by address and port, default options but CUBIC, {LINE_MBIT} Mbit/s. "
        f"Frames of 4 MiB, two at a time, twice for {SECONDS:g} s; the second figure counts. One TLS connection goes "
        "from a home to a public address over an equal line."
    )
    if way == "punched":
        return Report("punched_speed", "Tensors through a punched hole", tuple(rows), (note,))
    relayed = (
        "No packet passes directly between the homes, as with symmetric routers. Both reach the relay over such a "
        "line, so the round trip between them is twice as long. Without loss frames have 16 MiB. Both ways: each "
        "frame comes back, at the same time as others are sent."
    )
    return Report("relayed_speed", "Tensors through a relay", tuple(rows), (note, relayed))


def _punched_rows(condition: Condition) -> list[Row]:
    with homes_behind_routers(LINE_MBIT, condition.rtt_ms, condition.loss) as (relay, left, right):
        single = _single(relay, left)
        streams, bodies = (_between(relay, left, right, more) for more in (("--streams",), ()))
    text = f"{bodies.later:.1f} Mbit/s over {bodies.connections} ({bodies.first:.1f} at first); one TLS {single:.1f}"
    met = condition.is_met(bodies.later, single)
    return [
        Row(f"punched, {condition.name}", text, condition.goal, met),
        Row(f"punched, streams alone, {condition.name}", f"{streams.later:.1f} Mbit/s", "report", None),
    ]


def _relayed_rows(condition: Condition) -> list[Row]:
    options = ["--relayed"]
    if not condition.loss:
        options += ["--frame-mib", "16"]
        share = 0.9
        condition = replace(condition, share_of_single=share, goal=f">= {share} of one TLS connection")
    with homes_behind_routers(LINE_MBIT, condition.rtt_ms, condition.loss) as (relay, left, right):
        separate(left, right)
        single = _single(relay, left)
        one_way, both = (_between(relay, left, right, (*options, *more)) for more in ((), ("--echo",)))
    text = f"{one_way.later:.1f} Mbit/s ({one_way.first:.1f} at first); one TLS {single:.1f}"
    return [
        Row(f"relayed, {condition.name}", text, condition.goal, condition.is_met(one_way.later, single)),
        Row(f"relayed, both ways, {condition.name}", f"{both.later:.1f} Mbit/s each", "report", None),
    ]


def _single(relay: Home, left: Home) -> float:
    """Mbit/s of one TLS connection."""
    with bulk_pair("raw", CUBIC, PUBLIC_ADDRESS, serve_in=relay.prefix, ask_in=left.prefix) as raw:
        return raw.send_for(SECONDS).mbit_per_second


def _between(relay: Home, left: Home, right: Home, options: Sequence[str]) -> _Speed:
    with ExitStack() as stack:
        address = stack.enter_context(_peer(relay, "relay", *options))
        circuit = stack.enter_context(_peer(right, "serve", address, *options))
        command = [*left.prefix, *_command("ask", circuit, f"{SECONDS:g}", *options)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=ASK_SECONDS)
    facts: dict[str, Any] = json.loads(done.stdout)
    first, later = facts["mbit"]
    return _Speed(first, later, facts["connections"])


@contextmanager
def _peer(home: Home, *arguments: str) -> Generator[str]:
    """A process at a home; the line that it prints."""
    command = [*home.prefix, *_command(*arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.punched_peer", *arguments, *CUBIC]
