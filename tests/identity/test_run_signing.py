from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neuroshard.config.run_parameters import MAX_SEEDS
from neuroshard.identity import (
    RunParametersError,
    SignatureError,
    SignedRunParameters,
    TokenSecret,
    Wallet,
    canonical_json,
    genesis_pins_from_json,
    parse_token,
    run_id,
    run_parameters_from_json,
    run_parameters_to_json,
)
from tests.worlds.claims import FIRST as PARAMETERS
from tests.worlds.claims import OWNER, SEED

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS: dict[str, Any] = json.loads((FOLDER / "identity.json").read_text("utf-8"))
RUNS: dict[str, Any] = json.loads((FOLDER / "runs.json").read_text("utf-8"))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The parameters as JSON with one field set, or removed when the value is Ellipsis."""
    whole = json.loads(json.dumps(run_parameters_to_json(PARAMETERS)))
    *outer, name = path.split(".")
    target = whole
    for key in outer:
        target = target[key]
    if value is ...:
        del target[name]
    else:
        target[name] = value
    return whole


def test_parameters_survive_json() -> None:
    assert run_parameters_from_json(run_parameters_to_json(PARAMETERS)) == PARAMETERS
    unsigned = replace(PARAMETERS, genesis=replace(PARAMETERS.genesis, signing_key=None))
    assert run_parameters_from_json(run_parameters_to_json(unsigned)) == unsigned


def test_signed_parameters_and_run_id_are_stable() -> None:
    vector = VECTORS["run"]
    assert parse_token(vector["owner_token"]).seed == bytes(32)
    signed = SignedRunParameters.from_json(vector["signed"].encode())
    assert signed.parameters == PARAMETERS
    assert signed == SignedRunParameters.sign(OWNER, PARAMETERS)
    assert run_id(OWNER.public_key, PARAMETERS) == vector["run_id"]


@pytest.mark.parametrize("name", ["first_format", "second_format", "third_format"])
def test_runs_of_every_format_keep_id_signature_and_bytes(name: str) -> None:
    """The first was signed by hand for parameters that did not know admission, seeds and holds_from_outer_step yet."""
    vector = RUNS[name]
    owner = Wallet.from_secret(parse_token(vector["owner_token"]))
    signed = SignedRunParameters.from_json(vector["signed"].encode())
    assert run_id(signed.owner_public_key, signed.parameters) == vector["run_id"]
    assert signed.to_json().decode() == vector["signed"]
    assert signed == SignedRunParameters.sign(owner, signed.parameters)
    assert canonical_json(run_parameters_to_json(signed.parameters)).decode() == vector["parameters"]


def test_later_fields_are_written_only_when_they_say_something() -> None:
    plain = run_parameters_to_json(PARAMETERS)
    assert plain.keys().isdisjoint({"admission", "seeds", "holds_from_outer_step", "wire_precision", "routing"})
    told = replace(PARAMETERS, admission="strangers", seeds=(SEED,), holds_from_outer_step=3, wire_precision="int8")
    value = run_parameters_to_json(told)
    expected = {"admission": "strangers", "seeds": [SEED], "holds_from_outer_step": 3, "wire_precision": "int8"}
    assert dict(value) == {**plain, **expected}
    assert run_parameters_from_json(value) == told
    assert run_parameters_from_json({**plain, "admission": "friends", "seeds": []}) == PARAMETERS
    beside = replace(PARAMETERS, outer=replace(PARAMETERS.outer, overlap=True))
    outer, plain_outer = run_parameters_to_json(beside)["outer"], plain["outer"]
    assert isinstance(plain_outer, dict)
    assert outer == {**plain_outer, "overlap": True}
    assert "overlap" not in plain_outer
    with_muon = replace(PARAMETERS, inner=replace(PARAMETERS.inner, optimizer="muon"))
    inner, plain_inner = run_parameters_to_json(with_muon)["inner"], plain["inner"]
    assert isinstance(plain_inner, dict)
    assert inner == {**plain_inner, "optimizer": "muon"}
    assert "optimizer" not in plain_inner
    assert run_id(OWNER.public_key, told) != run_id(OWNER.public_key, PARAMETERS)


def test_runs_open_to_strangers_are_routed_in_lanes() -> None:
    plain = run_parameters_to_json(PARAMETERS)
    assert run_parameters_from_json({**plain, "routing": "balanced"}).routing == "balanced"
    with pytest.raises(RunParametersError, match="routing must be lanes where strangers are admitted: balanced"):
        run_parameters_from_json({**plain, "routing": "balanced", "admission": "strangers"})


def test_the_run_id_depends_on_owner_and_parameters_but_not_on_how_a_number_is_written() -> None:
    other_owner = Wallet.from_secret(TokenSecret("hex", bytes([1] * 32)))
    other = replace(PARAMETERS, sequences_per_step=16)
    ids = {run_id(OWNER.public_key, PARAMETERS), run_id(other_owner.public_key, PARAMETERS)}
    assert len(ids | {run_id(OWNER.public_key, other)}) == 3
    whole = replace(PARAMETERS, architecture=replace(PARAMETERS.architecture, rope_theta=10_000))
    assert run_id(OWNER.public_key, whole) == run_id(OWNER.public_key, PARAMETERS)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("architecture.hidden_size", ..., r"missing required field `hidden_size` - at `\$\.architecture`"),
        ("outer.momentum", ..., r"missing required field `momentum` - at `\$\.outer`"),
        ("outer.nesterov", True, r"unknown field `nesterov` - at `\$\.outer`"),
        ("batch_size", "4", r"Expected `int`.* - at `\$\.batch_size`"),
        ("batch_size", True, r"Expected `int`.* - at `\$\.batch_size`"),
        ("batch_size", 4.0, r"Expected `int`.* - at `\$\.batch_size`"),
        ("batch_size", -1, r"Expected `int` >= 1 - at `\$\.batch_size`"),
        ("batch_size", 0, r"Expected `int` >= 1 - at `\$\.batch_size`"),
        ("architecture.layer_count", 10**30, r"Expected `int` <= .* - at `\$\.architecture\.layer_count`"),
        ("architecture.head_count", 3, "head_count must divide"),
        ("stage_count", 3, "stage_count must not exceed"),
        ("inner.schedule", "step", r"Expected one of cosine, linear, constant - at `\$\.inner\.schedule`"),
        ("inner.schedule", ["cosine"], "Expected one of cosine"),
        ("inner.learning_rate", None, r"Expected `float`, got `null` - at `\$\.inner\.learning_rate`"),
        ("inner.learning_rate", 10**400, r"`\$\.inner\.learning_rate`"),
        ("inner.learning_rate", float("inf"), r"`\$\.inner\.learning_rate`"),
        ("outer.trim_fraction", 0.5, r"`\$\.outer\.trim_fraction`"),
        ("genesis.signing_key", 5, r"Expected `str \| null`, got `int` - at `\$\.genesis\.signing_key`"),
        ("genesis.root", "0" * 65, r"matching regex .* - at `\$\.genesis\.root`"),
        ("genesis.root", "/../" * 16, r"matching regex .* - at `\$\.genesis\.root`"),
        ("genesis.tokenizer_sha256", "../../keys/node", r"matching regex .* - at `\$\.genesis\.tokenizer_sha256`"),
        ("genesis.signing_key", "AB" * 32, r"matching regex .* - at `\$\.genesis\.signing_key`"),
        ("name", None, r"`\$\.name`"),
        ("name", "n" * 257, r"length <= 256 - at `\$\.name`"),
        ("inner", [], r"Expected `object`, got `array` - at `\$\.inner`"),
        ("version", 0, r"Expected `int` >= 1 - at `\$\.version`"),
        ("admission", "everybody", "Expected one of friends, admitted, strangers"),
        ("admission", None, "Expected one of friends, admitted, strangers"),
        ("holds_from_outer_step", -1, r"Expected `int` >= 0 - at `\$\.holds_from_outer_step`"),
        ("seeds", SEED, r"Expected `array`, got `str` - at `\$\.seeds`"),
        ("seeds", [7], r"Expected `str`, got `int` - at `\$\.seeds\[0\]`"),
        ("seeds", ["/ip4/192.0.2.1"], "has no /tcp/"),
        ("seeds", [SEED] * (MAX_SEEDS + 1), r"length <= 16 - at `\$\.seeds`"),
        ("strangers", True, "unknown field `strangers`"),
        ("wire_precision", "fp16", r"Expected one of fp32, bf16, int8, int4, int4-rank8 - at `\$\.wire_precision`"),
        ("routing", "random", r"Expected one of lanes, balanced - at `\$\.routing`"),
        ("architecture.hidden_size", 66, "must be even"),
        ("architecture.rope_theta", 0, r"> 0.* - at `\$\.architecture\.rope_theta`"),
        ("inner.learning_rate", -1.0, r"> 0.* - at `\$\.inner\.learning_rate`"),
        ("inner.max_grad_norm", 0, r"> 0.* - at `\$\.inner\.max_grad_norm`"),
        ("inner.beta2", 1, r"< 1.* - at `\$\.inner\.beta2`"),
        ("inner.final_fraction", 1.5, r"<= 1.* - at `\$\.inner\.final_fraction`"),
        ("inner.weight_decay", -0.1, r">= 0.* - at `\$\.inner\.weight_decay`"),
        ("outer.momentum", 1.0, r"< 1.* - at `\$\.outer\.momentum`"),
        ("outer.learning_rate", float("nan"), r"`\$\.outer\.learning_rate`"),
        ("outer.max_round_seconds", 0.0, r"> 0.* - at `\$\.outer\.max_round_seconds`"),
        ("outer.overlap", 1, r"Expected `bool`, got `int` - at `\$\.outer\.overlap`"),
        ("genesis.next_merge_id", 513, "next_merge_id must not exceed vocabulary_size"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, named: str) -> None:
    with pytest.raises(RunParametersError, match=named):
        run_parameters_from_json(changed(path, value))


def test_nobody_signs_what_nobody_would_accept() -> None:
    with pytest.raises(RunParametersError, match="seeds"):
        SignedRunParameters.sign(OWNER, replace(PARAMETERS, seeds=(SEED,) * 17))


def test_pins_are_read_alone() -> None:
    value = run_parameters_to_json(PARAMETERS)["genesis"]
    assert genesis_pins_from_json(value) == PARAMETERS.genesis
    with pytest.raises(RunParametersError, match="Expected `object`, got `array`"):
        genesis_pins_from_json([value])
    assert isinstance(value, dict)
    with pytest.raises(RunParametersError, match=r"`\$\.root`"):
        genesis_pins_from_json({**value, "root": "x"})


def test_parameters_that_the_owner_did_not_sign_are_refused() -> None:
    value = json.loads(SignedRunParameters.sign(OWNER, PARAMETERS).to_json())
    value["parameters"]["outer"]["momentum"] = 0.99
    with pytest.raises(SignatureError):
        SignedRunParameters.from_json(json.dumps(value).encode())
    with pytest.raises(RunParametersError, match="missing required field `signature`"):
        SignedRunParameters.from_json(json.dumps({k: v for k, v in value.items() if k != "signature"}).encode())
    with pytest.raises(RunParametersError, match="at most"):
        SignedRunParameters.from_json(b" " * 100_000)
