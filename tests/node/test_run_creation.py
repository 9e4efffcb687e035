"""A run is made once from file, wallet and data; later versions are its owner's, and change only what they may."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.node_process import TOKEN
from neuroshard.data.manifest import parse_manifest
from neuroshard.errors import DamagedFileError, DataError, DataUnavailableError, UsageError
from neuroshard.identity import TokenSecret, Wallet, parse_token
from neuroshard.model.subspace_basis import basis_sha256, subspace_basis
from neuroshard.runs.authority_key import load_or_create_authority_key
from neuroshard.runs.creation import (
    FieldChange,
    Owner,
    create_run,
    differences,
    newest_offer,
    next_version,
    sign_version,
    update_run,
    write_offer,
)
from neuroshard.runs.offer import RunOffer, read_offer
from neuroshard.runs.run_file import RunConfig, entry_of
from neuroshard.runs.stored_runs import JoinedRuns, read_offer_file
from neuroshard.types import JsonValue

CONFIG: RunConfig = {"name": "friends", "architecture": {"depth": 2, "sequence_length": 64}, "inner_lr": 1e-3}
STRANGER = Wallet.from_secret(TokenSecret("hex", bytes(32)))


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(Wallet.from_secret(parse_token(TOKEN)), tmp_path / "node")


@pytest.fixture
def made(owner: Owner, small_genesis: Path) -> RunOffer:
    return create_run(owner, CONFIG, str(small_genesis)).offer


def test_a_run_pins_its_data_and_is_stored(owner: Owner, made: RunOffer, small_genesis: Path) -> None:
    manifest = parse_manifest((small_genesis / "manifest.json").read_bytes())
    pins = made.parameters.genesis
    assert (pins.root, pins.total_shards, pins.signing_key) == (manifest.root(), 16, manifest.signing_key)
    assert made.parameters.architecture.vocabulary_size == pins.next_merge_id == 400
    assert made.owner == owner.wallet.wallet_id
    assert JoinedRuns(owner.data_dir).load(made.run_id) == made
    assert read_offer(made.to_json()) == made


def test_the_owner_signs_the_basis_of_a_subspace(owner: Owner, small_genesis: Path) -> None:
    config = {**CONFIG, "num_stages": 2, "architecture": {"depth": 2, "sequence_length": 64, "subspace_rank": 8}}
    made = create_run(owner, config, str(small_genesis)).offer
    shape, seed = made.parameters.architecture, made.parameters.initial_weights_seed
    assert (shape.subspace_rank, shape.free_blocks) == (8, 1)
    assert made.parameters.subspace_sha256 == basis_sha256(subspace_basis(shape.hidden_size, 8, seed))


def test_an_organised_run_names_the_key_of_its_data_folder(owner: Owner, small_genesis: Path) -> None:
    config = {**CONFIG, "admission": "admitted"}
    made, again = (create_run(owner, config, str(small_genesis)) for _ in range(2))
    key = load_or_create_authority_key(owner.data_dir)
    assert made.offer.parameters.authority == (key.public_key.hex(),)
    assert (again.offer, again.is_new) == (made.offer, False)
    (file,) = (owner.data_dir / "organiser").glob("authority-key")
    assert file.stat().st_mode & 0o077 == 0
    updated = update_run(owner, made.offer, {"authority": ["ab" * 32], "holds_from_outer_step": 4}).offer
    assert updated.parameters.authority == ("ab" * 32,)
    file.write_bytes(b"{}")
    with pytest.raises(DamagedFileError, match="Restore it from a backup"):
        load_or_create_authority_key(owner.data_dir)


def test_the_same_file_wallet_and_data_are_the_same_run(owner: Owner, made: RunOffer, small_genesis: Path) -> None:
    again = create_run(owner, CONFIG, str(small_genesis))
    assert (again.offer, again.is_new) == (made, False)
    other = create_run(Owner(STRANGER, owner.data_dir), CONFIG, str(small_genesis))
    assert other.is_new
    assert other.offer.run_id != made.run_id


def test_pins_in_the_file_must_be_those_of_the_source(owner: Owner, made: RunOffer, small_genesis: Path) -> None:
    pins = made.parameters.genesis
    table = {
        "root": pins.root,
        "total_shards": pins.total_shards,
        "signing_key": pins.signing_key,
        "tokenizer_sha256": pins.tokenizer_sha256,
        "next_merge_id": 350,  # a run may use a part of the table
    }
    pinned = create_run(owner, {**CONFIG, "genesis": table}, str(small_genesis)).offer
    assert pinned.parameters.genesis == replace(pins, next_merge_id=350)
    assert pinned.parameters.architecture.vocabulary_size == 350
    for wrong in ({"root": "12" * 32}, {"total_shards": 17}, {"next_merge_id": 401}):
        with pytest.raises(DataError, match=str(small_genesis)):
            create_run(Owner(owner.wallet, owner.data_dir / "new"), {**CONFIG, "genesis": {**table, **wrong}},
                       str(small_genesis))  # fmt: skip
    with pytest.raises(DataError, match=r"\$\.root"):
        create_run(owner, {**CONFIG, "genesis": {**table, "root": "../../x"}}, str(small_genesis))


def test_a_source_that_does_not_answer_ends_in_time(owner: Owner) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(DataUnavailableError, match=f"{address} does not answer within 0.5 s: 127.0.0.1 cannot be"):
            create_run(owner, CONFIG, address, seconds=0.5)
    assert time.monotonic() - started < 10
    assert not (owner.data_dir / "runs").exists()


def test_later_versions_follow_each_other(owner: Owner, made: RunOffer, small_genesis: Path) -> None:
    second = update_run(owner, made, {"inner_lr": 5e-4, "holds_from_outer_step": 10})
    assert second.is_new
    assert (second.offer.run_id, second.offer.initial) == (made.run_id, made.initial)
    expected = replace(made.parameters, version=2, holds_from_outer_step=10,
                       inner=replace(made.parameters.inner, learning_rate=5e-4))  # fmt: skip
    assert second.offer.parameters == expected
    # an old file in hand: the newest version known here is the one that is followed
    third = update_run(owner, made, {"outer_lr": 0.5, "holds_from_outer_step": 10}).offer
    assert (third.parameters.version, third.parameters.inner.learning_rate) == (3, 5e-4)
    assert JoinedRuns(owner.data_dir).load(made.run_id) == third
    assert read_offer(third.to_json()) == third
    made_again = create_run(owner, CONFIG, str(small_genesis))
    assert "version 3 is known" in made_again.reason


def test_the_whole_file_may_be_given_again_with_a_change(owner: Owner, made: RunOffer) -> None:
    offer = update_run(owner, made, {**CONFIG, "outer_lr": 0.5, "holds_from_outer_step": 1}).offer
    assert offer.parameters.outer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"inner_lr": 1e-4}, "does not have holds_from_outer_step"),
        ({"holds_from_outer_step": 5}, "changes no value of version 1"),
        ({"inner_lr": 1e-3, "holds_from_outer_step": 5}, "changes no value of version 1"),
        ({"inner_steps": 7, "holds_from_outer_step": 5}, "inner_steps cannot change"),
        ({"num_stages": 2, "name": "x", "holds_from_outer_step": 5}, "name, num_stages cannot change"),
        ({"architecture": {"depth": 3}, "holds_from_outer_step": 5}, "architecture cannot change"),
        ({"outer_momentum": 0.5, "holds_from_outer_step": 5}, "outer_momentum cannot change"),
        ({"inner_optimizer": "muon", "holds_from_outer_step": 5}, "inner_optimizer cannot change .*: the moments that"),
        ({"admission": "strangers", "holds_from_outer_step": 5}, "admission cannot change"),
        ({"outer_lr": -1, "holds_from_outer_step": 5}, "outer_lr = -1 cannot be used"),
    ],
)
def test_what_no_later_version_can_be_is_told(owner: Owner, made: RunOffer, config: RunConfig, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        update_run(owner, made, config)
    assert JoinedRuns(owner.data_dir).load(made.run_id) == made


def test_a_later_version_does_not_hold_earlier(owner: Owner, made: RunOffer) -> None:
    second = update_run(owner, made, {"inner_lr": 5e-4, "holds_from_outer_step": 10}).offer
    with pytest.raises(UsageError, match="is before that of version 2, 10"):
        update_run(owner, second, {"inner_lr": 1e-4, "holds_from_outer_step": 9})


def test_versions_to_come_are_all_kept(owner: Owner, made: RunOffer) -> None:
    update_run(owner, made, {"inner_lr": 5e-4, "holds_from_outer_step": 10})
    third = update_run(owner, made, {"outer_lr": 0.5, "holds_from_outer_step": 20}).offer
    rates = [third.parameters_at(step).inner.learning_rate for step in (0, 9, 10, 20)]
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4]
    assert [third.parameters_at(step).outer.learning_rate for step in (10, 19, 20)] == [1.0, 1.0, 0.5]
    assert JoinedRuns(owner.data_dir).load(made.run_id) == third


def test_more_versions_than_nodes_can_tell_of_are_refused(owner: Owner, made: RunOffer) -> None:
    seeds: list[JsonValue] = [
        f"/dns4/{'a' * 60}.example/tcp/{port}/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
        for port in range(4001, 4017)
    ]

    def sign_on() -> None:
        for step in range(1, 40):
            update_run(owner, made, {"seeds": seeds[step % 16 :], "holds_from_outer_step": step})

    with pytest.raises(UsageError, match="versions already"):
        sign_on()
    last = JoinedRuns(owner.data_dir).load(made.run_id)
    assert last is not None
    start = last.parameters.holds_from_outer_step
    instead = update_run(owner, made, {"inner_lr": 1e-5, "holds_from_outer_step": start}).offer
    assert len(instead.versions) == len(last.versions)


@pytest.mark.parametrize(
    ("name", "typed", "values"),
    [
        ("sequences_per_step", "16", (4, 16)),
        ("schedule", "linear", ("cosine", "linear")),
        ("warmup_steps", "7", (100, 7)),
        ("decay_steps", "9", (100_000, 9)),
        ("final_fraction", "0", (0.1, 0.0)),
        ("max_grad_norm", "5e-1", (1.0, 0.5)),
        ("overlap", "true", (False, True)),
        ("codec", '"int8"', ("int4", "int8")),
    ],
)
def test_one_name_changes_with_a_version_that_applies_soon(
    owner: Owner, made: RunOffer, name: str, typed: str, values: tuple[object, object]
) -> None:
    newest = newest_offer(owner, made)
    parameters = next_version(newest, entry_of(name, typed))
    assert differences(newest.parameters, parameters) == [FieldChange(name, *values)]
    assert (parameters.version, parameters.holds_from_outer_step) == (2, 0)
    assert sign_version(owner, newest, parameters).offer.parameters == parameters


@pytest.mark.parametrize(
    ("name", "typed", "said"),
    [
        ("architecture", "{ depth = 3 }", "architecture cannot change in a run that exists: the weights"),
        ("num_stages", "2", "num_stages cannot change in a run that exists: the plan says"),
        ("admission", "strangers", "admission cannot change in a run that exists: it decides how votes count"),
        ("wire_precision", "bf16", "wire_precision cannot change in a run that exists: a stage refuses"),
        ("beta1", "0.8", r"beta1 cannot change in a run that exists\."),
        ("schedule", "sawtooth", "schedule = 'sawtooth' cannot be used"),
        ("warmup_steps", "soon", "warmup_steps = 'soon' cannot be used"),
        ("averaging_timeout", "60", "averaging_timeout: a time limit .* is not in this version"),
        ("codec", "int4", "The file changes no value"),
        ("inner_rate", "1", "Unknown name inner_rate"),
    ],
)
def test_a_name_or_value_that_cannot_change_is_refused_with_the_reason(
    owner: Owner, made: RunOffer, name: str, typed: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        next_version(newest_offer(owner, made), entry_of(name, typed))


def test_only_the_owner_signs(owner: Owner, made: RunOffer) -> None:
    with pytest.raises(UsageError, match=f"belongs to wallet {owner.wallet.wallet_id}"):
        update_run(Owner(STRANGER, owner.data_dir), made, {"inner_lr": 1e-4, "holds_from_outer_step": 1})


def test_the_signed_file_can_be_read_by_all(owner: Owner, made: RunOffer, tmp_path: Path) -> None:
    write_offer(made, tmp_path / "run.json")
    assert read_offer_file(tmp_path / "run.json") == made
    assert (tmp_path / "run.json").stat().st_mode & 0o444 == 0o444
    assert (tmp_path / "run.json").read_text().count("\n") > 40  # for people
