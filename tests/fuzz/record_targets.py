"""Readers of signed records: claims, and the parameters of runs."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from neuroshard.errors import DataError
from neuroshard.identity import (
    ClaimTooLargeError,
    canonical_json,
    parse_json,
    read_claim,
    run_parameters_from_json,
    run_parameters_to_json,
    verify_claim,
)
from neuroshard.runs.offer import MAX_OFFER_BYTES, read_offer
from tests.fuzz.target import Target, golden
from tests.worlds.claims import altered

_NOW = 1_700_000_010.0


def check_claim(data: bytes) -> None:
    """A claim that can be decoded can be encoded again, unless that is too large, and verifying never crashes."""
    try:
        claim = read_claim(data, object)
    except DataError:
        return
    with suppress(ClaimTooLargeError):
        assert read_claim(claim.encode(), object) == claim
    with suppress(DataError):
        verify_claim(claim, "announcement", _NOW)


def check_run_parameters(data: bytes) -> None:
    """What stands before the signature is checked: parameters that are read can be written and read again."""
    try:
        parameters = run_parameters_from_json(parse_json(data, MAX_OFFER_BYTES))
    except (DataError, ValueError):
        return
    written = canonical_json(run_parameters_to_json(parameters))
    assert run_parameters_from_json(parse_json(written, 10 * MAX_OFFER_BYTES)) == parameters


def check_run_offer(data: bytes) -> None:
    """An offer that is read says the same again."""
    try:
        offer = read_offer(data)
    except DataError:
        return
    assert read_offer(offer.to_json()) == offer


def claim_seeds() -> tuple[bytes, ...]:
    """The golden claim, whole and with other payloads."""
    encoded = bytes.fromhex(golden("identity.json")["claim"]["encoded"])
    payloads = (
        None,
        [],
        {"😀": [-1e-300, 0.0, 1e5, 12345678901234567890]},
        "\0 é",
        b"\xff",
        msgspec.Raw(b"\x91" * 70 + b"\x90"),
    )
    others = (altered(encoded, partial(setitem, payload=payload)) for payload in payloads)
    return (encoded, *others)


def setitem(content: list[Any], payload: object) -> None:
    """Another payload in a claim."""
    content[0] = payload


def run_parameters_seeds() -> tuple[bytes, ...]:
    """The parameters of the golden runs."""
    return tuple(json.dumps(json.loads(run["signed"])["parameters"]).encode() for run in golden_runs())


def run_offer_seeds() -> tuple[bytes, ...]:
    """Offers of the golden runs, and one that mixes two."""
    runs = golden_runs()
    offers = [offer_of(run["run_id"], run["signed"], run["signed"]) for run in runs]
    return (*offers, offer_of(runs[0]["run_id"], runs[0]["signed"], runs[1]["signed"]))


def golden_runs() -> list[dict[str, str]]:
    """Run id and signed parameters of each."""
    return [golden("identity.json")["run"], *(run for run in golden("runs.json").values() if "signed" in run)]


def offer_of(run_id: str, initial: str, current: str) -> bytes:
    """An offer as JSON."""
    return f'{{"run_id":"{run_id}","initial":{initial},"current":{current}}}'.encode()


TARGETS = (
    Target("claim", check_claim, claim_seeds),
    Target("run-parameters", check_run_parameters, run_parameters_seeds),
    Target("run-offer", check_run_offer, run_offer_seeds),
)
