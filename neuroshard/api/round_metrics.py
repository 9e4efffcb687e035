"""Certified rounds as Prometheus metrics, by stage of this node."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from neuroshard.api.metric_families import PREFIX
from neuroshard.status.snapshot import NodeStatus

_BY_STAGE = ("stage",)
_BY_REASON = ("stage", "reason")


def round_metrics(status: NodeStatus) -> Iterator[Metric]:
    """Counts since this node's start; no value for a stage without rounds, but for zeros of what is counted."""
    completed = _counter("rounds_completed", "Certified rounds that completed", _BY_STAGE)
    abandoned = _counter("rounds_abandoned", "Certified rounds that came to nothing here", _BY_REASON)
    accepted = _counter("round_contributions_accepted", "Contributions to completed rounds", _BY_STAGE)
    refused = _counter("round_contributions_refused", "Contributions refused in completed rounds", _BY_REASON)
    sent = _counter("round_sent_bytes", "Bytes of rounds sent", _BY_STAGE)
    received = _counter("round_received_bytes", "Bytes of rounds received", _BY_STAGE)
    seconds = GaugeMetricFamily(PREFIX + "round_seconds", "Of the last round", labels=["stage", "phase"])
    for one in status.diloco.rounds:
        stage = str(one.stage)
        completed.add_metric([stage], one.completed)
        accepted.add_metric([stage], one.accepted)
        sent.add_metric([stage], one.bytes_sent)
        received.add_metric([stage], one.bytes_received)
        for reason, count in one.abandoned:
            abandoned.add_metric([stage, reason.value], count)
        for refusal, count in one.refused:
            refused.add_metric([stage, refusal], count)
        for phase, value in vars(one.recent[-1].seconds).items() if one.recent else ():
            if isfinite(value):
                seconds.add_metric([stage, phase], value)
    yield from (completed, abandoned, accepted, refused, sent, received, seconds)


def _counter(name: str, help_text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, help_text, labels=labels)
