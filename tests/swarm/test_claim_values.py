from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.shard_assignment import MAX_RANGES
from neuroshard.identity import MalformedClaimError, read_claim, sign_claim
from neuroshard.identity.admissions import MAX_ADMISSION_BYTES
from neuroshard.identity.invitations import MAX_PASS_BYTES
from neuroshard.membership.announcements import Announcement, report_topic
from neuroshard.membership.claim_intake import signed_report
from neuroshard.membership.reports import MAX_DEVICE_CHARACTERS, MAX_REPORT_BYTES, MAX_WINDOWS, TrainingReport
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.network.transport import RECORD_KIND, checked_record, node_of_address
from neuroshard.status.snapshot import NodeState
from neuroshard.types import LayerRange, NodeId, Role, RunId, ShardId, ShardRange
from tests.worlds.claims import EPOCH, OTHER_RUN, REPORT, RUN, announcement_of, identity_of, told

T = TypeVar("T")
ALICE, BOB = identity_of(1), identity_of(2)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=20)
    | st.floats()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


POSSIBLE = st.fixed_dictionaries(
    {
        "steps": st.integers(0, 10**12),
        "tokens": st.integers(0, 10**16),
        "loss_ema": st.none() | st.floats(0, 10_000).map(lambda loss: round(loss, 5)),
        "shard": st.none() | st.integers(0, 10**8).map(ShardId),
        "tokens_per_second": st.floats(0, 1e9).map(lambda speed: round(speed, 1)),
        "state": st.sampled_from(NodeState),
        "roles": st.lists(st.sampled_from(Role), unique=True, max_size=3).map(tuple),
        "state_hash": st.sampled_from(["", "ab" * 32]),
        "layers": st.sampled_from([None, LayerRange(0, 4), LayerRange(3, 4096)]),
        "leaving": st.booleans(),
        "windows": st.sampled_from([(), (StageRange(0, 2), StageRange(2, 3))]),
        "ready_percent": st.integers(0, 100),
        "cached": st.sampled_from([(), (ShardRange(0, 2), ShardRange(3, 400))]),
    }
)


def received(payload: object, form: type[T]) -> T:
    """The payload of a claim, as a node reads it."""
    return read_claim(sign_claim(ALICE, "any", payload, EPOCH).encode(), form).payload


@given(POSSIBLE)
def test_every_possible_report_survives_the_wire(changes: dict[str, Any]) -> None:
    report = msgspec.structs.replace(REPORT, **changes)
    assert received(report, TrainingReport) == report


def span(start: object, stop: object) -> list[object]:
    """A range as it travels."""
    return [start, stop]


NO_SPANS = [{"start": 0, "stop": 3}, [], [0], [0, 3, 4], span(3, 3), span(4, 3), span(-1, 3), span("0", "1")]


BAD_REPORT_FIELDS: list[tuple[str, list[Any]]] = [
    ("run_id", [None, "", "AB" * 32, "ab" * 33, 5]),
    ("sequence", [-1, 2**53 + 1, 1.0, True, None, "1"]),
    ("steps", [-1, 10**12 + 1, 10**19, 0.5, math.nan]),
    ("tokens", [-1, 10**16 + 1, None]),
    ("loss_ema", [math.nan, math.inf, -math.inf, -0.1, 10_000.1, 10**19, "3", True]),
    ("shard", [-1, 10**8 + 1, 1.5]),
    ("shards_seen", [-1, None, 10**9]),
    ("roles", [None, "driver", ["king"], ["driver", "driver"], [["driver"]], ["driver"] * 4, ["`$[999]`"]]),
    ("layers", [*NO_SPANS, span(0, 4097)]),
    ("outer_step", [-1, None]),
    ("state_hash", ["x", "AB" * 32, "ab" * 31, None, 0]),
    ("successful_syncs", [-1, 1.0]),
    ("failed_syncs", [-1, 10**13]),
    ("tokens_per_second", [math.nan, math.inf, -1, 1e10, None]),
    ("state", ["sleeping", None, 3, ["training"], {}, "`$[999]`"]),
    ("started_at", [math.nan, -1, 1e12]),
    ("interval_seconds", [0, 0.5, 1001, math.inf, None]),
    ("leaving", [0, 1, None, "yes"]),
    ("inherited_steps", [-1, 10**12 + 1, None]),
    ("inherited_tokens", [-1, 10**16 + 1, 0.5]),
    ("windows", [None, 5, "12", [None], *([one] for one in NO_SPANS), [span(0, 4097)]]),
    ("windows", [[span(0, 1)] * 65]),
    ("ready_percent", [-1, 101, 0.5, None, True]),
    (
        "cached",
        [
            *(None, 5, [None], *([one] for one in NO_SPANS), [span(0, 10**8 + 1)]),
            *([span(0, 1), span(1, 2)], [span(5, 6), span(0, 1)], [span(2 * n, 2 * n + 1) for n in range(17)]),
        ],
    ),
    ("held_out_loss", [math.nan, math.inf, -0.1, 10_000.1, "3", True]),
    ("held_out_step", [-1, 10**12 + 1, None]),
    ("device", ["x" * 41, "\n", "caf\u00e9", None, 1]),
    ("flops_per_second", [math.nan, math.inf, -1, 1e22, None]),
    ("reachable", ["yes", 1]),
]


def test_every_field_of_a_report_is_checked() -> None:
    assert {name for name, _ in BAD_REPORT_FIELDS} == set(TrainingReport.__struct_fields__)
    for name, values in BAD_REPORT_FIELDS:
        for value in values:
            with pytest.raises(MalformedClaimError, match=name):
                received(told(REPORT, **{name: value}), TrainingReport)


def test_the_longest_report_fits() -> None:
    stages = tuple(StageRange(4095, 4096) for _ in range(MAX_WINDOWS))
    shards = tuple(ShardRange(10**8 - 3 * n, 10**8 - 3 * n + 1) for n in reversed(range(MAX_RANGES)))
    longest = msgspec.structs.replace(
        REPORT,
        sequence=2**53,
        steps=10**12,
        tokens=10**16,
        shard=ShardId(10**8),
        shards_seen=10**8,
        layers=LayerRange(4095, 4096),
        outer_step=10**12,
        successful_syncs=10**12,
        failed_syncs=10**12,
        inherited_steps=10**12,
        inherited_tokens=10**16,
        windows=stages,
        cached=shards,
        held_out_loss=9_999.9,
        held_out_step=10**12,
        roles=tuple(Role),
        device="d" * MAX_DEVICE_CHARACTERS,
    )
    assert 0.6 * MAX_REPORT_BYTES < len(signed_report(ALICE, longest, EPOCH)) < MAX_REPORT_BYTES
    assert len(signed_report(ALICE, REPORT, EPOCH)) < 460


def test_reports_with_missing_or_unknown_fields_are_refused() -> None:
    with pytest.raises(MalformedClaimError, match="at most length 28, got 29"):
        received(told(REPORT, extra=1), TrainingReport)
    with pytest.raises(MalformedClaimError, match="at least length 17, got 16"):
        received(told(REPORT)[:16], TrainingReport)
    fields = msgspec.to_builtins(announcement_of(ALICE))
    with pytest.raises(MalformedClaimError, match="unknown field `extra`"):
        received({**fields, "extra": 1}, Announcement)
    del fields["pool"]
    with pytest.raises(MalformedClaimError, match="missing required field `pool`"):
        received(fields, Announcement)


@given(PLAIN, st.sampled_from([name for name, _ in BAD_REPORT_FIELDS]))
def test_whatever_a_stranger_writes_is_read_or_refused(value: Any, name: str) -> None:
    for payload in (value, told(REPORT, **{name: value})):
        try:
            report = received(payload, TrainingReport)
        except MalformedClaimError:
            continue
        assert received(report, TrainingReport) == report  # what was accepted can be told again


def test_an_announcement_survives_the_wire() -> None:
    for announcement in (
        announcement_of(ALICE),
        announcement_of(ALICE, pool=None, addresses=(), is_relay=True),
        announcement_of(ALICE, addresses=(f"/ip4/1.2.3.4/tcp/1/p2p/12D3relay/p2p-circuit/p2p/{ALICE.node_id}",)),
    ):
        assert received(announcement, Announcement) == announcement
        assert announcement.leads_to(ALICE.node_id)


def test_every_field_of_an_announcement_is_checked() -> None:
    own = f"/ip4/203.0.113.7/tcp/4001/p2p/{ALICE.node_id}"
    bad: list[tuple[str, list[Any]]] = [
        ("run_id", [None, "short"]),
        ("parameters_version", [-1, 1.5, None]),
        ("layers", [*NO_SPANS, span(0, 4097)]),
        ("addresses", [None, own, [5], [own + "\n"], ["x" + own], ["/a b/p2p/" + ALICE.node_id], [own] * 17]),
        ("addresses", [["/" * 300]]),
        ("pool", [5, "x" * 257, "\x1b[31m"]),
        ("started_at", [math.nan, None, -1]),
        ("memory_tier_mb", [-1, 10**10, None]),
        ("is_relay", [None, 1]),
        ("version", [None, "x" * 33, "<b>\u2028"]),
        ("member_pass", [5, b"x" * (MAX_PASS_BYTES + 1)]),
        ("admission", [5, b"x" * (MAX_ADMISSION_BYTES + 1)]),
    ]
    fields = msgspec.to_builtins(announcement_of(ALICE))
    assert {name for name, _ in bad} == set(fields)
    for name, values in bad:
        for value in values:
            with pytest.raises(MalformedClaimError, match=name):
                received({**fields, name: value}, Announcement)
    for address in (own.replace(ALICE.node_id, BOB.node_id), "/ip4/203.0.113.7/tcp/4001"):
        assert not announcement_of(ALICE, addresses=(own, address)).leads_to(ALICE.node_id)


def test_a_record_is_read_as_an_announcement_or_refused() -> None:
    def kept(payload: object) -> Announcement:
        record = sign_claim(ALICE, RECORD_KIND, payload, EPOCH).encode()
        return checked_record(ALICE.node_id, record, EPOCH, Announcement).payload

    good = msgspec.to_builtins(announcement_of(ALICE))
    assert kept(good) == announcement_of(ALICE)
    with pytest.raises(MalformedClaimError, match="addresses of other nodes"):
        kept(announcement_of(BOB))
    for payload in (None, [], "text", {}, {**good, "more": 1}, {**good, "layers": span(3, 2)}):
        with pytest.raises(MalformedClaimError, match="cannot be read"):
            kept(payload)


def test_the_topic_of_a_run_is_named_after_it() -> None:
    assert report_topic(RUN) == f"reports/{RUN}/0"
    assert report_topic(RUN) != report_topic(OTHER_RUN)
    assert node_of_address(f"/ip4/1.2.3.4/tcp/5/p2p/{ALICE.node_id}") == ALICE.node_id
    assert node_of_address("/ip4/1.2.3.4/tcp/5") == NodeId("")


def test_layers_and_runs_are_typed_values() -> None:
    report = received(REPORT, TrainingReport)
    assert (report.layers, report.run_id, report.started_at) == (LayerRange(0, 12), RunId(RUN), EPOCH - 100)
