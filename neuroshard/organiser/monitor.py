"""The monitor of a run: the facts that certificates prove and that nodes report, for the public page.

Work, rounds and the model's rate come from certificates. Losses, participants and join times are reports of nodes:
their signatures are verified, and their content is the nodes' own. A value that is too old becomes null.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from statistics import median
from threading import RLock
from typing import Any

from neuroshard.data.shard_assignment import held_out_count
from neuroshard.model.architecture import flops_per_token, plan_of
from neuroshard.organiser.desk import RunPlan
from neuroshard.organiser.history import RunHistory, RunSample, StoredValue, Work, work_of
from neuroshard.organiser.observations import (
    CertifiedValue,
    Observation,
    ObserverEnded,
    ObserverStarted,
    RunSight,
    StageSight,
)
from neuroshard.types import DAY_SECONDS, WalletId

_LOG = logging.getLogger(__name__)

PETA, EXA = 10**15, 10**18
FRESH_SECONDS = 60.0  # of the last sight; older ones are not the present
RATE_VALUES = 16  # newest aggregates from which the rate of the model follows
RATE_FRESH_SECONDS = 900.0  # at least; a run with long rounds is current for three of them
SAMPLE_SECONDS = 60.0
SHOWN_ROUNDS = 50
SHOWN_POINTS = 300
SHOWN_WALLETS = 500
REPORTED, CERTIFIED = "reported_tokens", "certified_tokens"


class RunMonitor:
    """Folds the observations into facts. `trouble` is a sentence for the operator, or ""."""

    def __init__(self, plan: RunPlan, history: RunHistory, now: Callable[[], float]) -> None:
        """Begin with the stored history. Raises sqlite3.Error."""
        parameters = plan.parameters
        self._history = history
        self._now = now
        self._tokens = parameters.architecture.sequence_length  # per sequence
        self._shards = parameters.genesis.total_shards - held_out_count(parameters.genesis.total_shards)
        self._flops = [flops_per_token(parameters.architecture, layers) for layers in plan_of(parameters)]
        self._lock = RLock()  # observations come from another thread than the questions
        self._sight: RunSight | None = None
        self.addresses: tuple[str, ...] = ()  # of nodes that reported at the last sight
        self._watching_since = 0.0  # first sight of the present observer
        self._sampled_at = 0.0
        self._ended = ""  # why the observer ended last
        self.trouble = ""
        self._load()

    def _load(self) -> None:
        values, earlier = self._history.values(), self._history.earlier_values()
        self._work = self._history.earlier_work()
        self._known, self._heights, self._rounds = ([0] * len(self._flops) for _ in range(3))
        self._recent = [deque[StoredValue](maxlen=SHOWN_ROUNDS) for _ in self._flops]
        known_since = (*(value.at for value in values), *(work.since for work in self._work.values()))
        self._first_at = min(known_since, default=0)
        for stage, sums in earlier.items():
            self._known[stage], self._heights[stage], self._rounds[stage] = sums.count, sums.height, sums.rounds
        for value in values:
            self._add(value)
        self._add_work(values)

    def _add_work(self, values: Iterable[StoredValue]) -> None:
        for key, work in work_of(values).items():
            self._work[key] = self._work.get(key, Work()).plus(work)

    def _add(self, value: StoredValue) -> None:
        stage = value.stage
        self._known[stage] += 1
        self._heights[stage] = max(self._heights[stage], value.height)
        self._rounds[stage] += value.kind == "aggregate"
        self._recent[stage].append(value)

    def note(self, observation: Observation) -> None:
        """Take one observation. A database that cannot be written costs history only."""
        with self._lock:
            self._note(observation)

    def _note(self, observation: Observation) -> None:
        try:
            match observation:
                case ObserverStarted():
                    self._watching_since, self._ended = 0.0, ""
                case ObserverEnded(reason):
                    self._ended = reason
                case CertifiedValue():
                    self._note_value(observation)
                case RunSight():
                    self._note_sight(observation)
        except sqlite3.Error as error:
            if not self.trouble:
                _LOG.error("The history of the run cannot be written: %s", error)
            self.trouble = f"The history of the run cannot be written ({error})."
        else:
            self.trouble = ""

    def _note_value(self, value: CertifiedValue) -> None:
        if value.stage >= len(self._flops):
            return
        kept = self._history.keep_value(value)
        if kept == "known":
            return
        if kept == "replaced":
            self._load()
            return
        stored = StoredValue(
            value.stage,
            value.height,
            value.outer_step,
            value.at,
            value.sequences,
            value.seconds,
            value.members,
            value.kind,
            value.accepted,
        )
        self._first_at = min(self._first_at or value.at, value.at)
        self._add(stored)
        self._add_work([stored])
        is_watched = 0 < self._watching_since <= value.at - value.seconds
        if value.stage == 0 and value.kind == "aggregate" and is_watched:
            self._history.count(CERTIFIED, self._tokens_of(stored))

    def _note_sight(self, sight: RunSight) -> None:
        self._sight, self.addresses = sight, sight.addresses
        self._watching_since = self._watching_since or sight.at
        if sight.new_tokens:
            self._history.count(REPORTED, sight.new_tokens)
        for ready in sight.ready:
            self._history.keep_ready(sight.at, ready)
        if sight.at - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = sight.at
            loss, held_out = sight.loss, sight.held_out_loss
            rate = self._rate(-1, sight.at)
            self._history.keep_sample(
                RunSample(int(sight.at), self.outer_step, loss, held_out, rate, sight.training_nodes)
            )

    def _tokens_of(self, value: StoredValue) -> int:
        return value.sequences * self._tokens * len(value.accepted)

    @property
    def outer_step(self) -> int:
        """Outer steps that every stage has certified."""
        return min(values[-1].outer_step if values else 0 for values in self._recent)

    def newest(self, stage: int) -> StoredValue | None:
        """The newest certified value of a stage."""
        with self._lock:
            return self._recent[stage][-1] if self._recent[stage] else None

    def _rate(self, stage: int, now: float) -> float | None:
        """Tokens per second that passed a stage, by its newest aggregates; None if these are old."""
        newest = [value for value in self._recent[stage] if value.kind == "aggregate" and value.seconds][-RATE_VALUES:]
        if not newest or now - newest[-1].at > max(RATE_FRESH_SECONDS, 3 * newest[-1].seconds):
            return None
        return sum(map(self._tokens_of, newest)) / sum(value.seconds for value in newest)

    def _operations(self) -> dict[WalletId, int]:
        """Certified floating-point operations of each wallet."""
        found: defaultdict[WalletId, int] = defaultdict(int)
        for (wallet, stage), work in self._work.items():
            found[wallet] += work.sequences * self._tokens * self._flops[stage]
        return dict(found)

    def run_facts(self) -> dict[str, Any]:
        """The body of `GET /api/run`, apart from the places. Raises sqlite3.Error."""
        with self._lock:
            return self._run_facts()

    def _run_facts(self) -> dict[str, Any]:
        now, operations = self._now(), self._operations()
        rate, counted, samples = self._rate(-1, now), self._history.counted(), self._history.samples()
        reported, certified = counted.get(REPORTED, 0), counted.get(CERTIFIED, 0)
        joins = self._history.join_seconds(now - DAY_SECONDS)
        return {
            "started_at": min(filter(None, (self._first_at, samples[0].at if samples else 0)), default=None),
            "outer_step": self.outer_step,
            "tokens_per_second": rate,
            "flops_per_token": sum(self._flops),
            "flops_per_second": None if rate is None else rate * sum(self._flops),
            "pflop_total": sum(operations.values()) / PETA,
            "participants_ever": len(operations),
            "above_one_exaflop": sum(each >= EXA for each in operations.values()),
            "share_of_work_in_aggregates": min(1.0, certified / reported) if reported else None,
            "successful_syncs": sum(self._rounds),
            "join_seconds": {"median": median(joins) if joins else None, "nodes": len(joins)},
            "data_shards": self._shards,
            **self._reported(now),
            "rounds": self._shown_rounds(),
            "certificates": [
                {"stage": stage, "height": height, "known": known, "missing": height - known}
                for stage, (height, known) in enumerate(zip(self._heights, self._known, strict=True))
            ],
            "held_out": _changes(samples),
            "history": [_rounded(sample) for sample in _thinned(samples)],
        }

    def _reported(self, now: float) -> dict[str, Any]:
        """The part that nodes report, under the names of `/api/training/global`. Null if the last sight is old."""
        sight = self._sight
        seen_at = None if sight is None else sight.at
        if sight is None or now - sight.at > FRESH_SECONDS:
            names = "participants_now training_nodes trainers global_loss global_min_loss held_out_loss total_steps"
            names += " total_tokens data_shards_covered reported_tokens_per_second connections"
            names += " reported_flops_per_second reachable_nodes unreachable_nodes devices"
            return {**dict.fromkeys(names.split()), "seen_at": seen_at}
        return {
            "participants_now": sight.nodes,
            "training_nodes": sight.training_nodes,
            "trainers": sight.trainers,
            "global_loss": sight.loss,
            "global_min_loss": sight.min_loss,
            "held_out_loss": sight.held_out_loss,
            "total_steps": sight.total_steps,
            "total_tokens": sight.total_tokens,
            "data_shards_covered": sight.shards_covered,
            "reported_tokens_per_second": sight.tokens_per_second,
            "reported_flops_per_second": sight.flops_per_second,
            "reachable_nodes": sight.reachable_nodes,
            "unreachable_nodes": sight.unreachable_nodes,
            "devices": [{"device": each.device, "nodes": each.nodes} for each in sight.devices],
            "connections": sight.connections,
            "seen_at": seen_at,
        }

    def stages(self) -> Sequence[tuple[StageSight | None, float | None]]:
        """The nodes of each stage, and the tokens per second that its certificates prove."""
        now, sight = self._now(), self._sight
        is_fresh = sight is not None and now - sight.at <= FRESH_SECONDS
        seen = sight.stages if sight is not None and is_fresh else (None,) * len(self._flops)
        with self._lock:
            return [(one, self._rate(stage, now)) for stage, one in enumerate(seen[: len(self._flops)])]

    @property
    def explanation(self) -> str:
        """One sentence about what the monitor sees, and what it needs."""
        sight = self._sight
        if self._ended:
            return f"The process that observes the run has ended ({self._ended}). It starts again."
        if sight is None:
            return "The monitor has not reported yet."
        if sight.explanation:
            return sight.explanation
        troubles = dict.fromkeys(stage.trouble for stage in sight.stages if stage.trouble)
        return " ".join(troubles)

    def _shown_rounds(self) -> list[dict[str, Any]]:
        newest = sorted((value for stage in self._recent for value in stage), key=lambda value: -value.at)
        return [
            {
                "stage": value.stage,
                "height": value.height,
                "outer_step": value.outer_step,
                "time": value.at,
                "kind": value.kind,
                "members": value.members,
                "accepted": len(value.accepted),
                "tokens": self._tokens_of(value),
                "seconds": value.seconds,
            }
            for value in islice(newest, SHOWN_ROUNDS)
        ]

    def leaderboard(self) -> dict[str, Any]:
        """The body of `GET /api/leaderboard`: the certified work of each wallet. Raises sqlite3.Error.

        Tokens, rounds and hours are those of the stage in which the wallet has the most: a token passes every stage.
        """
        with self._lock:
            return self._leaderboard()

    def _leaderboard(self) -> dict[str, Any]:
        names, operations = self._history.names(), self._operations()
        most: dict[WalletId, Work] = {}
        since: dict[WalletId, int] = {}
        for (wallet, _), work in self._work.items():
            before = most.get(wallet, Work())
            most[wallet] = Work(*map(max, _sums(before), _sums(work)))
            since[wallet] = min(since.get(wallet, work.since), work.since)
        order = sorted(operations, key=lambda wallet: (-operations[wallet], wallet))
        return {
            "wallets": [
                {
                    "wallet": wallet,
                    "name": names.get(wallet),
                    "pflop": operations[wallet] / PETA,
                    "tokens": most[wallet].sequences * self._tokens,
                    "rounds": most[wallet].rounds,
                    "hours": most[wallet].seconds / 3600,
                    "since": since[wallet],
                }
                for wallet in order[:SHOWN_WALLETS]
            ],
            "count": len(order),
            "pflop_total": sum(operations.values()) / PETA,
        }


def _sums(work: Work) -> tuple[int, int, int]:
    return work.sequences, work.rounds, work.seconds


def _rounded(sample: RunSample) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in vars(sample).items()}


def _thinned(samples: Sequence[RunSample]) -> Sequence[RunSample]:
    """At most SHOWN_POINTS samples, evenly chosen, with the newest one."""
    if len(samples) <= SHOWN_POINTS:
        return samples
    return [samples[(len(samples) - 1) * index // (SHOWN_POINTS - 1)] for index in range(SHOWN_POINTS)]


def _changes(samples: Iterable[RunSample]) -> list[dict[str, float]]:
    """The held-out losses with the times at which they were first seen."""
    known = [sample for sample in samples if sample.held_out_loss is not None]
    pairs = pairwise([None, *known])
    changed = [
        after for before, after in pairs if after and (not before or before.held_out_loss != after.held_out_loss)
    ]
    return [{"time": one.at, "loss": one.held_out_loss or 0.0} for one in _thinned(changed)]
