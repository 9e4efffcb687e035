"""The public answers about a run: JSON, Prometheus metrics, and the page. Cached for 5 s, compressed, no cookies."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.responses import Response

from neuroshard.organiser.desk import AdmissionDesk, RunPlan
from neuroshard.organiser.monitor import RunMonitor
from neuroshard.runs.offer import RunOffer, better_of
from neuroshard.runs.stored_runs import JoinedRuns

PUBLIC_SECONDS = 5  # for which an answer is kept, here and by others
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_PAGE: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_GAUGES: Final = {
    "outer_step": "outer steps that every stage has certified",
    "tokens_per_second": "tokens that passed the last stage, by its newest certificates [tokens/s]",
    "reported_tokens_per_second": "sum of the reports of nodes with the first layers [tokens/s]",
    "reported_flops_per_second": "sum of the reports, forward and backward [FLOP/s]",
    "reachable_nodes": "nodes that the organiser reached from outside, by their reports",
    "unreachable_nodes": "nodes that the organiser did not reach from outside, by their reports",
    "flops_per_second": "certified rate times the operations of a token, forward and backward [FLOP/s]",
    "pflop_total": "certified floating-point operations [PFLOP]",
    "participants_now": "nodes that report",
    "training_nodes": "nodes that report that they train",
    "participants_ever": "wallets with certified work",
    "above_one_exaflop": "wallets with more than an exaflop of certified work",
    "share_of_work_in_aggregates": "part of the reported tokens that certificates name [0..1]",
    "successful_syncs": "certified aggregates, of all stages",
    "global_loss": "training loss, mean of the reports weighted by tokens [nats/token]",
    "held_out_loss": "held-out loss, median of the reports [nats/token]",
    "total_tokens": "tokens that nodes report",
    "queue": "nodes that wait for a place",
    "organiser_fresh_at": "time of this answer [s since 1970]",
    "seen_at": "time of the newest reports [s since 1970]",
}


class NewestRun:
    """The newest version of a run, whose owner may sign one while the organiser runs.

    Versions come from the owner's commands on this data folder, and from members that the observer has met.

    Both are in files whose signatures are checked at each look. One thread looks at a time.
    """

    def __init__(self, offer: RunOffer, folders: Sequence[Path] = ()) -> None:
        """`folders` are the data folders of the owner and of the observer."""
        self._offer = offer
        self._stores = [JoinedRuns(folder) for folder in folders]

    def look(self) -> RunOffer:
        """The run with all versions that are stored now. Blocks."""
        for store in self._stores:
            found = store.load(self._offer.run_id)
            if found is not None:
                self._offer = better_of(self._offer, found).offer
        return self._offer


class PublicFacts:
    """The bodies of the public routes. Methods raise sqlite3.Error. One thread calls them at a time."""

    def __init__(
        self,
        plan: RunPlan,
        desk: AdmissionDesk,
        monitor: RunMonitor | None,
        now: Callable[[], float],
        warning: str,
        *,
        newest: NewestRun | None = None,
    ) -> None:
        """`warning` is about the database at the start. Without `newest` the run of the plan has no later version."""
        self._plan = plan
        self._newest = newest or NewestRun(plan.offer)
        self._desk = desk
        self._monitor = monitor
        self._now = now
        self._warning = warning
        self._kept: dict[str, tuple[float, bytes, bytes]] = {}  # time, body, and the body compressed

    def run(self) -> dict[str, Any]:
        """The run: its places, what certificates prove, and what nodes report."""
        offer, monitor, desk = self._newest.look(), self._monitor, self._desk
        trouble = (self._warning, desk.trouble, "" if monitor is None else monitor.trouble)
        return {
            "name": offer.parameters.name,
            "run_id": offer.run_id,
            "version": offer.parameters.version,
            "stages": self._stages(),
            "queue": desk.waiting(),
            "has_list": desk.has_list(),
            "refused": dict(desk.refused),
            "trouble": " ".join(filter(None, trouble)),
            "organiser_fresh_at": self._now(),
            "is_monitored": monitor is not None,
            "monitor": "" if monitor is None else monitor.explanation,
            **({} if monitor is None else monitor.run_facts()),
        }

    def _stages(self) -> list[dict[str, Any]]:
        free = self._desk.free_places()
        seen = () if self._monitor is None else self._monitor.stages()
        stages = list[dict[str, Any]]()
        for index, stage in enumerate(self._plan.stages):
            sight, rate = seen[index] if index < len(seen) else (None, None)
            stages.append(
                {
                    "stage": stage.name,
                    "layers": None if stage.layers is None else (stage.layers.start, stage.layers.stop),
                    "wanted": stage.wanted,
                    "free": free[stage.name],
                    "memory_mb": stage.memory_mb,
                    "replicas": None if sight is None else sight.replicas,
                    "preparing": None if sight is None else sight.preparing,
                    "tokens_per_second": rate,
                    "version": None if sight is None else sight.version,
                    "version_from": None if sight is None else sight.version_from,
                }
            )
        return stages

    def parameters(self) -> bytes:
        """The signed parameters of the run, all versions, as its nodes send them."""
        return self._newest.look().to_json()

    def leaderboard(self) -> dict[str, Any]:
        """Certified work by wallet."""
        return {"wallets": [], "count": 0, "pflop_total": 0.0} if self._monitor is None else self._monitor.leaderboard()

    def metrics(self) -> bytes:
        """The facts as Prometheus text. Unknown values are left out."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Values(self.run()))
        return generate_latest(registry)

    def kept(self, name: str) -> tuple[bytes, bytes]:
        """A body of at most PUBLIC_SECONDS of age: as it is, and compressed."""
        known, now = self._kept.get(name), self._now()
        if known is None or not 0 <= now - known[0] < PUBLIC_SECONDS:
            found = getattr(self, name)()
            body = found if isinstance(found, bytes) else _json(found)
            known = self._kept[name] = (now, body, gzip.compress(body, 6, mtime=0))
        return known[1:]


class _Values(Collector):
    """The metrics of one answer of `GET /api/run`."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self._facts
        for name, meaning in _GAUGES.items():
            value = facts.get(name)
            if value is not None and isfinite(value):
                yield GaugeMetricFamily(f"neuroshard_run_{name}", f"{meaning[:1].upper()}{meaning[1:]}", value)
        for name, meaning in (
            ("replicas", "Nodes that work on a stage"),
            ("wanted", "Nodes that a stage wants"),
            ("free", "Free places of a stage"),
            ("tokens_per_second", "Certified tokens that pass a stage"),
        ):
            family = GaugeMetricFamily(f"neuroshard_run_stage_{name}", meaning, labels=["stage"])
            for stage in facts["stages"]:
                if stage[name] is not None:
                    family.add_metric([stage["stage"]], stage[name])
            yield family
        refused = GaugeMetricFamily("neuroshard_run_refused", "Refused requests since the start", labels=["code"])
        for code, count in facts["refused"].items():
            refused.add_metric([code], count)
        yield refused


def public_routes(ask: Callable[..., Any], facts: PublicFacts) -> APIRouter:
    """The routes of the public page. `ask` calls a function in the thread of the database."""
    router = APIRouter()

    async def respond(request: Request, name: str, media: str) -> Response:
        body, compressed = await ask(lambda: facts.kept(name))
        return _public(request, body, compressed, media)

    @router.get("/api/run")
    async def run(request: Request) -> Response:
        """The run: places, queue and trouble; work and rounds that certificates prove; losses that nodes report."""
        return await respond(request, "run", "application/json")

    @router.get("/api/leaderboard")
    async def leaderboard(request: Request) -> Response:
        """The wallets with the most certified work; names are those that their owners want to show."""
        return await respond(request, "leaderboard", "application/json")

    @router.get("/api/parameters")
    async def parameters(request: Request) -> Response:
        """The signed parameters of the run, all versions, as its nodes send them."""
        return await respond(request, "parameters", "application/json")

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """The facts of `/api/run` for Prometheus."""
        return await respond(request, "metrics", CONTENT_TYPE_PLAIN_0_0_4)

    def page(path: str) -> None:
        name, media = _PAGE[path]

        @router.get(path, include_in_schema=False, name=name)
        async def file(request: Request) -> Response:
            return _public(request, *_page_file(name), media)

    for path in _PAGE:
        page(path)
    return router


def _public(request: Request, body: bytes, compressed: bytes, media: str) -> Response:
    headers = {"Cache-Control": f"public, max-age={PUBLIC_SECONDS}", "Vary": "Accept-Encoding", **SECURITY_HEADERS}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(body, headers=headers, media_type=media)
    return Response(compressed, headers={"Content-Encoding": "gzip", **headers}, media_type=media)


@cache
def _page_file(name: str) -> tuple[bytes, bytes]:
    body = files("neuroshard.organiser").joinpath("page", name).read_bytes()
    return body, gzip.compress(body, 9, mtime=0)


def _json(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
