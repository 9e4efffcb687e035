"""Tokens per second of a model in stages over the lines of homes: the chain against the star, in turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from statistics import fmean

from benchmarks.chain_peer import ARCHITECTURE, BATCH, IN_FLIGHT, LENGTH, PRECISION, STAGES
from benchmarks.record import NotHereError, Report, Row, load_average, mean_with_interval
from benchmarks.rounds import Peer, running
from benchmarks.shaped_line import NoLineError, home_lines
from benchmarks.sizes import size
from neuroshard.model.architecture import parameter_count
from neuroshard.pipeline.stage_protocol import wire_bytes

PAIRS = int(os.environ.get("BENCHMARK_PAIRS", size(4, 1)))
MICROBATCHES = size(24, 3)
UP_MBIT, DOWN_MBIT, ONE_WAY_MS = 4, 50, 12.5
GOAL = 3.0


def measure() -> Report:
    """PAIRS turns of both, the order alternating. Raises NotHereError without lines."""
    try:
        with home_lines(STAGES, UP_MBIT, DOWN_MBIT, ONE_WAY_MS) as homes:
            commands = [
                [*home.prefix, sys.executable, "-m", "benchmarks.chain_peer", str(stage), home.address]
                for stage, home in enumerate(homes)
            ]
            with running(commands) as peers:
                return _measured(peers)
    except NoLineError as error:
        raise NotHereError(str(error)) from error


def _measured(peers: Sequence[Peer]) -> Report:
    facts = [peer.answer() for peer in peers]
    for peer in peers:
        peer.order({"peers": facts})
        peer.answer()
    rates: dict[str, list[float]] = {"chain": [], "star": []}
    sent: dict[str, list[float]] = {}
    for plane in ("star", "chain"):
        _driven(peers, plane, IN_FLIGHT)  # fills the connections' windows
    for pair in range(PAIRS):
        for plane in ("chain", "star") if pair % 2 == 0 else ("star", "chain"):
            before = _sent(peers)
            found = _driven(peers, plane, MICROBATCHES)
            rates[plane].append(found["tokens"] / found["seconds"])
            sent[plane] = [
                (after - earlier) / found["tokens"] for after, earlier in zip(_sent(peers), before, strict=True)
            ]
    ratio, half = mean_with_interval([one / other for one, other in zip(rates["chain"], rates["star"], strict=True)])
    rows = [
        Row("chain / star, tokens per second", f"{ratio:.2f} ± {half:.2f} (95 %)", f">= {GOAL:g}", ratio >= GOAL),
        Row("chain, star", f"{fmean(rates['chain']):,.0f}, {fmean(rates['star']):,.0f} tokens/s", "report", None),
    ]
    for plane, busiest in (("chain", 2), ("star", 2 * STAGES - 3)):
        formula = wire_bytes(1, busiest * ARCHITECTURE.hidden_size, PRECISION)
        rows.append(
            Row(
                f"{plane}: busiest upload per token, all bytes on the line",
                f"{max(sent[plane]):,.0f} B; by nodes {', '.join(f'{one:,.0f}' for one in sent[plane])}",
                f"the tensors have {formula:,} B",
                None,
            )
        )
    return Report("chain_speed", f"A model in {STAGES} stages over home lines: chain and star", tuple(rows), (_how(),))


def _driven(peers: Sequence[Peer], plane: str, microbatches: int) -> dict[str, float]:
    peers[0].order({"drive": microbatches, "plane": plane})
    found = peers[0].answer()
    if found["stars"]:
        raise RuntimeError("neighbours could not hand tensors to each other")
    return found


def _sent(peers: Sequence[Peer]) -> list[int]:
    for peer in peers:
        peer.order({"sent": True})
    return [int(peer.answer()["sent"]) for peer in peers]


def _how() -> str:
    millions = parameter_count(ARCHITECTURE) / 1e6
    return (
        f"{STAGES} processes with a stage each of a model of {millions:.1f} M parameters and width "
        f"{ARCHITECTURE.hidden_size}, the first one drives {IN_FLIGHT} microbatches of {BATCH} x {LENGTH} tokens at a "
        f"time; {PRECISION.value} on the wire; no optimizer steps. Each process has a line of {UP_MBIT} Mbit/s up, "
        f"{DOWN_MBIT} Mbit/s down and {ONE_WAY_MS:g} ms one way, so a message takes {2 * ONE_WAY_MS:g} ms to another "
        f"one and {4 * ONE_WAY_MS:g} ms there and back. One thread per process, all on two cores; load average "
        f"{load_average()}."
    )
