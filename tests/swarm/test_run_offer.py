"""What is accepted as a run and as a later version of it, and which of two versions holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.config.run_parameters import MAX_SEEDS, BranchPoint, RunParameters
from neuroshard.errors import DataError
from neuroshard.identity import RunParametersError, SignatureError, SignedRunParameters, run_id
from neuroshard.runs.offer import (
    MAX_OFFER_BYTES,
    MAY_CHANGE,
    RunOffer,
    RunOfferError,
    better_of,
    changed_fields,
    checked_offer,
    read_offer,
)
from neuroshard.types import RunId
from tests.worlds.claims import FIRST, OWNER, SEED, STRANGER, offer_of, version

VECTORS, VERSION_VECTORS = (
    json.loads((Path(__file__).parents[1] / "vectors" / name).read_text("utf-8"))
    for name in ("runs.json", "run_versions.json")
)
RUN = run_id(OWNER.public_key, FIRST)

BRANCH = BranchPoint("ab" * 32, 7, "cd" * 32)

SIGNED = {
    (number, start): SignedRunParameters.sign(OWNER, version(number + 2, 0.1 * (number + 1), start))
    for number in range(5)
    for start in range(31)
}


def chain_of(*later: RunParameters) -> RunOffer:
    """The run with these versions, signed one after another."""
    offer = offer_of()
    for parameters in later:
        offer = offer.with_version(SignedRunParameters.sign(OWNER, parameters))
    return offer


def test_an_offer_survives_its_json() -> None:
    for offer in (RunOffer.of_new_run(SignedRunParameters.sign(OWNER, FIRST)), offer_of(version(3))):
        assert offer.run_id == RUN
        assert checked_offer(RUN, offer.to_json()) == offer
    assert offer_of(version(3)).parameters == version(3)
    assert offer_of(version(3)).owner == OWNER.wallet_id


def test_the_json_of_an_offer_is_stable() -> None:
    vector = VECTORS["offer"]
    offer = checked_offer(RunId(vector["run_id"]), vector["json"].encode())
    assert offer.to_json().decode() == vector["json"]
    assert (offer.initial.parameters.version, offer.parameters.version) == (1, 2)
    assert (
        VERSION_VECTORS["offer_of_three_versions"]
        == chain_of(version(2, 0.8, 2), version(3, 0.7, 9)).to_json().decode()
    )


def test_the_largest_offer_fits() -> None:
    longest = "/dns4/" + ".".join(["a" * 50] * 3) + SEED.removeprefix("/ip4/192.0.2.1")
    seeds = tuple(longest.replace("/tcp/4001", f"/tcp/{4001 + number}") for number in range(MAX_SEEDS))
    large = replace(FIRST, name="\U0001f600" * 256, seeds=seeds)
    offer = offer_of(replace(large, version=2), large)
    assert read_offer(offer.to_json()) == offer
    assert (
        len(json.dumps(msgspec.to_builtins(offer.form), indent=1)) < MAX_OFFER_BYTES
    )  # also spaced out and with escapes


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": (SEED,)},
        {"holds_from_outer_step": 40},
        {"inner": replace(FIRST.inner, learning_rate=1e-3)},
        {"outer": replace(FIRST.outer, learning_rate=0.5, aggregator="median")},
        {"outer": replace(FIRST.outer, max_round_seconds=60.0)},
        {"outer": replace(FIRST.outer, overlap=True)},
        {},
    ],
)
def test_a_later_version_may_change_what_is_listed(changes: dict[str, Any]) -> None:
    offer = offer_of(replace(FIRST, version=2, **changes))
    assert checked_offer(RUN, offer.to_json()) == offer


@pytest.mark.parametrize(
    ("current", "named"),
    [
        (
            replace(FIRST, version=2, architecture=replace(FIRST.architecture, layer_count=3)),
            "architecture.layer_count, .*: the weights that the nodes keep would not fit",
        ),
        (
            replace(FIRST, version=2, genesis=replace(FIRST.genesis, root="12" * 32)),
            "genesis.root, .*: the data decide which text is held out",
        ),
        (replace(FIRST, version=2, wire_precision="bf16"), "wire_precision, .*: a stage refuses tensors"),
        (replace(FIRST, version=2, inner=replace(FIRST.inner, weight_decay=0.5)), "inner.weight_decay, .* change\\."),
        (replace(FIRST, version=2, inner=replace(FIRST.inner, optimizer="muon")), "inner.optimizer, .* moments .* not"),
        (replace(FIRST, version=2, outer=replace(FIRST.outer, momentum=0.5)), "outer.momentum"),
        (replace(FIRST, version=2, outer=replace(FIRST.outer, lone_outer="apply")), "outer.lone_outer"),
        (replace(FIRST, version=2, outer=replace(FIRST.outer, trim_fraction=0.2)), "outer.trim_fraction"),
        (replace(FIRST, version=2, outer=replace(FIRST.outer, inner_steps=5)), "outer.inner_steps"),
        (replace(FIRST, version=2, admission="strangers"), "admission, .*: it decides how votes count"),
        (replace(FIRST, version=2, name="other"), "name"),
        (replace(FIRST, version=2, branch=BRANCH), "branch"),
        (replace(FIRST, seeds=(SEED,)), "but seeds changed"),
    ],
)
def test_what_else_a_version_changes_is_named(current: RunParameters, named: str) -> None:
    with pytest.raises(RunOfferError, match=named):
        checked_offer(RUN, offer_of(current).to_json())


def test_no_version_changes_to_averaged_gradients_or_from_them() -> None:
    averaging = replace(FIRST, outer=replace(FIRST.outer, strategy="averaging", aggregator="mean", codec="fp32"))
    for first, then in ((FIRST, averaging), (averaging, FIRST)):
        offer = offer_of(replace(then, version=2, holds_from_outer_step=5), first)
        with pytest.raises(RunOfferError, match="weights would not fit"):
            checked_offer(offer.run_id, offer.to_json())
    factors = replace(averaging, version=2, outer=replace(averaging.outer, rank=8))
    with pytest.raises(RunOfferError, match=r"outer\.rank"):
        checked_offer(offer_of(averaging, averaging).run_id, offer_of(factors, averaging).to_json())
    lossy = replace(averaging, version=2, holds_from_outer_step=5, outer=replace(averaging.outer, codec="int8"))
    offer = offer_of(lossy, averaging)
    assert checked_offer(offer.run_id, offer.to_json()).parameters == lossy


def test_a_branch_keeps_the_division_of_the_data_and_its_place() -> None:
    first = replace(FIRST, branch=BRANCH)
    offer = offer_of(replace(first, version=2, seeds=(SEED,)), first)
    assert checked_offer(offer.run_id, offer.to_json()).data_run_id == "cd" * 32
    assert offer_of().data_run_id == RUN
    for place in (None, replace(BRANCH, outer_step=8)):
        moved = offer_of(replace(first, version=2, branch=place), first)
        with pytest.raises(RunOfferError, match="changes branch"):
            read_offer(moved.to_json())
    written = json.loads(offer.to_json())
    written["initial"]["parameters"]["branch"]["more"] = 1
    with pytest.raises(RunParametersError, match="unknown field `more`"):
        read_offer(json.dumps(written).encode())


def test_an_older_version_counts_for_nothing() -> None:
    fifth = replace(FIRST, version=5)
    with pytest.raises(RunOfferError, match="version 4 after version 5"):
        read_offer(offer_of(replace(FIRST, version=4), fifth).to_json())


def test_parameters_of_another_signer_are_refused() -> None:
    with pytest.raises(RunOfferError, match=STRANGER.wallet_id):
        read_offer(offer_of(version(2), signer=STRANGER).to_json())
    value = json.loads(offer_of(version(2)).to_json())
    value["current"]["parameters"]["outer"]["learning_rate"] = 0.1
    with pytest.raises(SignatureError):
        read_offer(json.dumps(value).encode())


def test_the_first_version_holds_from_the_start() -> None:
    late = replace(FIRST, holds_from_outer_step=1)
    with pytest.raises(RunOfferError, match="outer step 0"):
        read_offer(offer_of(late, late).to_json())


def test_an_offer_of_another_run_is_refused() -> None:
    with pytest.raises(RunOfferError, match="expected 0000"):
        checked_offer(RunId("0" * 64), offer_of().to_json())
    value = {**json.loads(offer_of().to_json()), "run_id": "0" * 64}
    with pytest.raises(RunOfferError, match="another run id"):
        checked_offer(RunId("0" * 64), json.dumps(value).encode())


FORM = b'{"parameters": {"name": "x"}, "owner_public_key": "%s", "signature": "%s"}' % (b"0" * 64, b"0" * 128)
DEEP = b'{"parameters": {"name": %s' % (b"[" * 20_000)
OFFER_WITH = b'{"run_id": "%s"%%s, "initial": %%s, "current": %%s}' % (b"0" * 64)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", RunOfferError, "cannot be read"),
        (b" " * (MAX_OFFER_BYTES + 1), RunOfferError, "at most"),
        (b"\xff", RunOfferError, "cannot be read"),
        (b"[" * 10_000, RunOfferError, "Expected `object`, got `array`"),
        (OFFER_WITH % (b"", DEEP, FORM), RunOfferError, "recursion"),
        (b"[]", RunOfferError, "Expected `object`, got `array`"),
        (b'{"run_id": "%s", "initial": %s}' % (b"0" * 64, FORM), RunOfferError, "missing required field `current`"),
        (OFFER_WITH % (b', "x": 1', FORM, FORM), RunOfferError, "unknown field `x`"),
        (OFFER_WITH % (b"", b"{}", FORM), RunOfferError, r"missing required field `parameters` - at `\$\.initial`"),
        (OFFER_WITH % (b"", FORM, b"[]"), RunOfferError, r"Expected `object`, got `array` - at `\$\.current`"),
        (OFFER_WITH % (b"", FORM, FORM), RunParametersError, "missing required field `architecture`"),
    ],
)
def test_malformed_offers_say_what_is_wrong(data: bytes, error: type[DataError], words: str) -> None:
    with pytest.raises(error, match=words):
        read_offer(data)


@given(data=st.data())
def test_a_changed_byte_never_makes_another_run(data: st.DataObject) -> None:
    """Whatever is done to the bytes: they are refused, or they say what they said before."""
    offer = offer_of(version(2))
    raw = bytearray(offer.to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    assert outcome(bytes(raw)) in (offer, None)


def written(offer: RunOffer) -> dict[str, Any]:
    """The newest version, as an offer contains it in JSON."""
    return msgspec.to_builtins(offer.current.form)


def outcome(raw: bytes) -> RunOffer | None:
    try:
        return checked_offer(RUN, raw)
    except DataError:
        return None


def test_the_higher_version_holds_whichever_came_first() -> None:
    second, third = offer_of(version(2)), offer_of(version(3))
    newer = better_of(second, third)
    assert (newer.offer.current, newer.is_new, newer.reason) == (third.current, True, "")
    older = better_of(newer.offer, second)
    assert (older.offer, older.is_new) == (newer.offer, False)
    assert "Version 2" in older.reason
    assert "version 3 is known" in older.reason
    completed = better_of(third, newer.offer)  # what it did not know lies before its newest
    assert (completed.offer, completed.is_new) == (newer.offer, True)
    same = better_of(third, offer_of(version(3)))
    assert (same.offer, same.is_new, same.reason) == (third, False, "")


def test_of_two_with_one_version_the_one_held_stays_and_the_owner_is_named_for_it() -> None:
    held, other = offer_of(version(2, outer_lr=0.8)), offer_of(version(2, outer_lr=0.6))
    for first, second in ((held, other), (other, held)):
        choice = better_of(first, second)
        assert (choice.offer, choice.is_new) == (first, False)
        assert "two versions 2 that differ in outer.learning_rate" in choice.reason


def test_each_version_holds_from_its_outer_step_until_a_higher_one_does() -> None:
    chain = chain_of(version(2, 0.8, 10), version(3, 0.7, 20), version(4, 0.6, 40))
    assert chain.parameters.version == 4  # the newest, though it is still to come
    held = {step: chain.parameters_at(step).version for step in (0, 9, 10, 19, 20, 39, 40, 10**6)}
    assert held == {0: 1, 9: 1, 10: 2, 19: 2, 20: 3, 39: 3, 40: 4, 10**6: 4}
    assert checked_offer(RUN, chain.to_json()) == chain
    assert chain.run_id == RUN
    assert [signed.parameters.version for signed in chain.versions] == [1, 2, 3, 4]
    assert [signed.parameters.version for signed in offer_of().versions] == [1]


def test_a_version_that_another_replaces_before_it_holds_is_left_out() -> None:
    chain = chain_of(version(2, 0.8, 10), version(3, 0.7, 20), version(4, 0.6, 20))
    assert [signed.parameters.version for signed in chain.versions] == [1, 2, 4]
    assert chain.parameters_at(20).version == 4
    at_once = chain_of(version(2, 0.8, 10), version(3, 0.7, 0))
    assert [signed.parameters.version for signed in at_once.versions] == [1, 3]
    assert at_once.parameters_at(0).version == 3
    assert checked_offer(RUN, at_once.to_json()) == at_once


@settings(deadline=None)
@given(order=st.permutations(range(5)), starts=st.lists(st.integers(0, 30), min_size=5, max_size=5))
def test_whoever_heard_of_the_versions_in_whatever_order_knows_the_same(order: list[int], starts: list[int]) -> None:
    """Peers tell of single versions; together they hold, at every outer step, the highest that has begun."""
    signed = [SIGNED[number, start] for number, start in enumerate(starts)]
    offers = [RunOffer(offer_of().initial, each) for each in signed]
    known = offer_of()
    for number in order:
        known = better_of(known, offers[number]).offer
    assert read_offer(known.to_json()) == known
    for step in (0, *starts, 31):
        begun = [number + 2 for number, start in enumerate(starts) if start <= step]
        assert known.parameters_at(step).version == max(begun, default=1)
    assert not better_of(known, offers[order[0]]).is_new


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda value: value["between"].reverse(),
        lambda value: value["between"].append(value["current"]),
        lambda value: value["between"].insert(0, value["initial"]),
        lambda value: value["between"].append(written(offer_of(version(9, 0.1, 25)))),
        lambda value: value["between"].append(written(offer_of(version(3, 0.1, 45)))),
    ],
)
def test_versions_that_do_not_follow_each_other_are_refused(spoilt: Callable[[Any], None]) -> None:
    value = json.loads(chain_of(version(2, 0.8, 10), version(3, 0.7, 20), version(4, 0.6, 40)).to_json())
    spoilt(value)
    with pytest.raises(RunOfferError, match=r"each hold after the one before"):
        read_offer(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("between", "error", "words"),
    [
        ({}, RunOfferError, r"\$\.between"),
        ([1], RunOfferError, r"\$\.between\[0\]"),
        ([written(offer_of(version(2), signer=STRANGER))], RunOfferError, STRANGER.wallet_id),
        (
            [msgspec.to_builtins(offer_of(replace(FIRST, version=2, batch_size=1)).current.form)],
            RunOfferError,
            "batch_size",
        ),
    ],
)
def test_each_version_between_is_checked_as_the_newest_is(between: Any, error: type[DataError], words: str) -> None:
    value = {**json.loads(offer_of(version(5, 0.5, 50)).to_json()), "between": between}
    with pytest.raises(error, match=words):
        read_offer(json.dumps(value).encode())


def test_an_offer_that_would_not_fit_any_more_stays_as_it_is() -> None:
    long = tuple(SEED.replace("/tcp/4001", f"/tcp/{4001 + number}") for number in range(MAX_SEEDS))
    large = [replace(FIRST, version=2 + number, holds_from_outer_step=1 + number, seeds=long) for number in range(40)]
    known = offer_of()
    for parameters in large:
        known = better_of(known, offer_of(parameters)).offer
    assert 10 < len(known.versions) < 39
    assert "more versions than an offer may carry" in better_of(known, offer_of(large[-1])).reason
    assert read_offer(known.to_json()) == known


def test_offers_of_different_runs_are_not_compared() -> None:
    other = replace(FIRST, name="other")
    with pytest.raises(ValueError, match="different runs"):
        better_of(offer_of(), offer_of(other, other))


def test_every_name_in_the_list_is_a_field() -> None:
    names = {item.name for item in dataclasses.fields(FIRST)}
    for part in ("inner", "outer", "architecture", "genesis"):
        names |= {f"{part}.{item.name}" for item in dataclasses.fields(getattr(FIRST, part))}
    assert names >= MAY_CHANGE
    assert changed_fields(FIRST, FIRST) == ()
