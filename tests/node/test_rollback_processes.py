"""`neuroshard run branch` and `run rollback` with a chosen state, and the members that follow to the new run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.friends import BEFORE_EVERY_TEST, invitation_to
from benchmarks.node_process import TOKEN, NodeProcess, running_node
from neuroshard.config.folders import prepare_data_dir
from neuroshard.consensus.committee import ADMISSION_SECONDS, Candidate, Committee, Seat
from neuroshard.consensus.foundation import Foundation, StageStart
from neuroshard.consensus.stage_chain import FileChainStore, certified_states, proven_chain
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.host.identity import node_identity
from neuroshard.identity import Wallet, parse_token
from neuroshard.membership.run_members import Papers
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations, no_foundations
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.runs.stored_runs import find_run
from neuroshard.state.checkpoint_catalogue import SavedStage, moment, saved_stages
from neuroshard.state.checkpoint_store import CheckpointStore, find_stage_folders, search_stage_folders, stage_folder
from neuroshard.state.kept_states import root_of_file
from neuroshard.state.tensor_file import TensorLayout, bytes_of, map_tensor_file, write_tensor_file
from neuroshard.types import NodeId, RunId, WalletId
from tests.worlds.commands import Outcome
from tests.worlds.processes import LONGEST_SECONDS, Run, made, neuroshard, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CONFIG = "architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 5\n"


def states_of(folder: Path, run_id: str) -> list[SavedStage]:
    """The saved states of a run, the oldest first."""
    (stage,) = [each for each in find_stage_folders(folder) if each.parent.name == run_id]
    return [each for each in reversed(saved_stages([stage])) if each.has_tensors and each.generation.step > 0]


def only_run(folder: Path) -> str:
    (stage,) = find_stage_folders(folder)
    return stage.parent.name


def command(name: str, folder: Path, *arguments: object) -> Outcome:
    return neuroshard("run", name, only_run(folder), "--yes", "--json", "--data-dir", folder, *arguments)


def settings_of(folder: Path, run_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(neuroshard("run", "show", run_id, "--data-dir", folder, "--json").out)
    return shown["parameters"]


def test_a_branch_begins_with_the_chosen_state_new_moments_and_other_settings(
    trained: Path, quick: list[str], tmp_path: Path
) -> None:
    run_id = only_run(trained)
    chosen = states_of(trained, run_id)[0]
    (tmp_path / "changes.toml").write_text('inner_lr = 0.25\nschedule = "constant"\nwarmup_steps = 0\nbeta1 = 0.8\n')
    where = ("--outer-step", chosen.generation.outer_step, "--config", tmp_path / "changes.toml")
    done = command("branch", trained, *where)
    assert done.code == 0, done.err
    new = done.json()["run_id"]
    parameters = settings_of(trained, new)
    assert (parameters["inner"]["learning_rate"], parameters["inner"]["beta1"]) == (0.25, 0.8)
    assert parameters["branch"]["outer_step"] == chosen.generation.outer_step
    assert len(parameters["branch"]["roots"]) == 1
    (copy,) = states_of(trained, new)
    first, tensors = (map_tensor_file(each.tensor_file, each.manifest.tensors.sha256) for each in (chosen, copy))
    assert first.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bool((tensor == 0).all()) if name.startswith("inner/") else bool((tensor == first[name]).all()), name
    again = neuroshard("run", "branch", run_id, "--yes", "--json", "--data-dir", trained, *where).json()
    assert (again["run_id"], again["is_new"]) == (new, False)
    other = neuroshard("run", "branch", run_id, "--yes", "--json", "--data-dir", trained, *where[:2]).json()
    assert other["run_id"] not in {new, run_id}  # other settings are another run
    with running_node(trained, [*quick, "--run", new]) as node:
        begun = chosen.generation.step
        node.wait_for("steps", lambda status: status["training"]["steps"] >= begun + 30)
        points = node.get("/api/training/history")["points"]
    rates = {point["step"] - begun: point["lr"] for point in points if point["step"] > begun}
    expected = {step: 0.25 * min(1.0, step / 20) for step in rates}
    # the steps since the last certified outer step are counted, too
    assert rates[max(rates)] == 0.25
    assert rates[1] >= expected[1] > 0
    assert min(rates.values()) == rates[1] < 0.25
    assert [rates[step] for step in sorted(rates)] == sorted(rates.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("architecture = { depth = 3 }\n", "A branch cannot change architecture"),
        ('inner_optimizer = "muon"\n', "A branch cannot change inner.optimizer"),
        ("num_stages = 2\n", "A branch cannot change stage_count"),
        ('strategy = "averaging"\n', "A branch cannot change outer.strategy"),
    ],
)
def test_a_change_that_does_not_fit_the_saved_tensors_is_refused(
    trained: Path, tmp_path: Path, changes: str, said: str
) -> None:
    (tmp_path / "changes.toml").write_text(changes)
    step = states_of(trained, only_run(trained))[0].generation.outer_step
    refused = command("branch", trained, "--outer-step", step, "--config", tmp_path / "changes.toml")
    assert refused.code == 2
    assert said in refused.err
    assert len(list((trained / "runs" / "joined").glob("*.foundations"))) == 1


def test_a_state_is_chosen_by_time_and_the_first_one_is_named(trained: Path) -> None:
    run_id = only_run(trained)
    first, *_, last = states_of(trained, run_id)
    assert first.generation.time + 1 < last.generation.time or first.generation.step < last.generation.step
    early = command("rollback", trained, "--at", "2020-01-01T00:00:00")
    assert early.code == 2
    assert f"The first saved state of layers 1-2 on this computer is of {moment(first.generation.time)}" in early.err
    assert f"checkpoint assemble --run {run_id} --at 2020-01-01T00:00:00 --out FOLDER" in early.err
    aimless = command("branch", trained, "--states", trained)
    assert (aimless.code, "--states needs the state to choose" in aimless.err) == (2, True)
    never = command("rollback", trained, "--outer-step", 10**6)
    assert never.code == 2
    assert "Name one of these outer steps: " in never.err
    both = command("rollback", trained, "--outer-step", 1, "--at", "2020-01-01T00:00:00")
    assert (both.code, "name two states" in both.err) == (2, True)
    neither = command("rollback", trained)
    assert (neither.code, "No state is named" in neither.err) == (2, True)
    at = moment(last.generation.time)
    assert datetime.fromisoformat(at).timestamp() <= last.generation.time
    (stage,) = command("branch", trained, "--at", at).json()["stages"]
    assert stage["step"] == last.generation.step


def test_only_the_owner_rolls_back_and_twice_is_once(trained: Path, quick: list[str]) -> None:
    run_id = only_run(trained)
    first, *_, last = states_of(trained, run_id)
    step = ("--outer-step", first.generation.outer_step)
    foreign = command("rollback", trained, *step, "--token", "ab" * 32)
    assert foreign.code == 2
    assert "belongs to wallet" in foreign.err
    done = command("rollback", trained, *step)
    assert done.code == 0, done.err
    new = done.json()["run_id"]
    assert settings_of(trained, run_id)["successor"] == new
    again = neuroshard("run", "rollback", run_id, "--yes", "--json", "--data-dir", trained, *step).json()
    assert (again["run_id"], again["is_new"]) == (new, False)
    assert settings_of(trained, run_id)["version"] == 2
    assert last.generation.outer_step != first.generation.outer_step
    other = neuroshard(
        *("run", "rollback", run_id, "--yes", "--data-dir", trained, "--outer-step", last.generation.outer_step)
    )
    assert other.code == 2
    assert f"continues run {run_id[:16]} as run {new[:16]} already" in other.err
    assert states_of(trained, run_id)[-1].generation == last.generation  # nothing of the old run is deleted
    with running_node(trained, quick) as node:  # the owner alone: a start without --run continues with the new run
        status = node.wait_for("training", lambda status: status["state"] == "training")
        assert status["run"]["run_id"] == new


def with_voters(run: Run, folder: Path) -> list[Candidate]:
    """Found the run's only stage with seats of the owner and two friends, which would take them half an hour.

    The first friend is a deputy. Returns the friends as candidates that have worked for long enough.
    """
    offer, seats = find_run(run.data_dir, RunId(run.run_id)), list[Seat]()
    assert offer is not None
    wallets = [Wallet.from_secret(parse_token(token)) for token in (TOKEN, "01" * 32, "02" * 32)]
    for wallet, place in zip(wallets, (run.data_dir, folder / "node-1", folder / "node-2"), strict=True):
        prepare_data_dir(place)
        seats.append(Seat(wallet.wallet_id, node_identity(wallet, place).node_id, 0))
    known = no_foundations(offer)
    start = StageStart(0, Committee.founded(seats, is_open=False))
    statement = known.next(wallets[0], [start], (wallets[1].public_key,))
    StoredFoundations(run.data_dir).write(offer, known.with_statements([statement]))
    return [Candidate(seat.wallet_id, seat.node_id, ADMISSION_SECONDS) for seat in seats[1:]]


def voters(node: NodeProcess) -> list[str]:
    return [voter["wallet_id"] for voter in node.get("/api/rounds")["voters"]]


def collect(trained: Path, states: Path) -> tuple[str, str]:
    """Move a certified state of the run into a folder as `checkpoint assemble` stores it; return run and root.

    Nothing of the run stays on the disk of its owner but its parameters, its foundation, and its other states.
    """
    run_id = only_run(trained)
    offer = find_run(trained, RunId(run_id))
    assert offer is not None
    (saved,) = [each for each in find_stage_folders(trained) if each.parent.name == run_id]
    founding = RunVersions(offer, StoredFoundations(trained).read(offer)).founding_of(0)
    assert founding is not None
    chain = proven_chain(FileChainStore(saved / ROUNDS_FOLDER), founding)
    certified = certified_states(chain)
    for state in states_of(trained, run_id):
        root = root_of_file(Path(state.generation.path), state.manifest)
        if (state.generation.outer_step, root) in certified:
            break
    else:
        pytest.fail("no checkpoint has a certified outer state")
    folder = stage_folder(states, WalletId("0" * 32), RunId(run_id), state.layers)
    folder.mkdir(parents=True)
    tensors = map_tensor_file(state.tensor_file, state.manifest.tensors.sha256)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("inner/")}
    with (folder / "incoming").open("wb") as file:
        digest = write_tensor_file(file, TensorLayout.of(kept), map(bytes_of, kept.values()))
    CheckpointStore(folder).adopt(state.manifest.meta, folder / "incoming", digest)
    certificate = certified[state.generation.outer_step, root].certificate
    (folder / "certificate.msgpack").write_bytes(msgspec.msgpack.encode(certificate))
    shutil.copytree(saved / ROUNDS_FOLDER, folder / ROUNDS_FOLDER)
    shutil.rmtree(saved)
    return run_id, root


def test_a_branch_uses_a_collected_state_only_with_its_certificate(
    trained: Path, quick: list[str], tmp_path: Path
) -> None:
    states = tmp_path / "states"
    run_id, root = collect(trained, states)
    (state,) = saved_stages(search_stage_folders(states))
    where = ("run", "branch", run_id, "--outer-step", state.generation.outer_step)
    where = (*where, "--yes", "--json", "--data-dir", trained)
    refused = neuroshard(*where)
    assert (refused.code, "then add `--states FOLDER`" in refused.err) == (2, True)
    shutil.copytree(states, tmp_path / "bare")
    for name in ("certificate.msgpack", "chain.msgpack"):
        (file,) = (tmp_path / "bare").rglob(name)
        file.unlink()
    assert "no other certified state" in neuroshard(*where, "--states", tmp_path / "bare").err
    assert "has no states of run" in neuroshard(*where, "--states", tmp_path / "nothing").err
    done = neuroshard(*where, "--states", states)
    assert done.code == 0, done.err
    new = done.json()["run_id"]
    (start,) = founded_branch(trained, new).stages
    assert start.root == root
    (copy,) = saved_stages(list((trained / "copies" / new).iterdir()))
    first, tensors = (map_tensor_file(each.tensor_file, each.manifest.tensors.sha256) for each in (state, copy))
    moments = {name for name in tensors if name.startswith("inner/")}
    assert tensors.keys() - moments == first.keys()
    assert moments
    for name, tensor in tensors.items():
        assert bool((tensor == (0 if name in moments else first[name])).all()), name
    with running_node(trained, [*quick, "--run", new]) as node:  # the only node of the run takes its copy over
        node.wait_for("steps", lambda status: status["training"]["steps"] >= copy.generation.step + 5)


def founded_branch(folder: Path, run_id: str) -> Foundation:
    offer = find_run(folder, RunId(run_id))
    assert offer is not None
    (signed,) = StoredFoundations(folder).read(offer).highest
    return signed.foundation


def test_a_branch_names_the_voters_unless_they_were_removed_or_the_owner_is_another(trained: Path) -> None:
    offer = find_run(trained, RunId(only_run(trained)))
    assert offer is not None
    owner, kept, removed = (Wallet.from_secret(parse_token(token)) for token in (TOKEN, "01" * 32, "02" * 32))
    seats = [Seat(each.wallet_id, NodeId(f"node {number}"), 0) for number, each in enumerate((owner, kept, removed))]
    stored = StoredFoundations(trained)
    known = stored.read(offer)
    statement = known.next(owner, [StageStart(0, Committee.founded(seats, is_open=False))])
    stored.write(offer, known.with_statements([statement]))
    member_pass = invitation_to(offer.run_id, owner).pass_for(removed.public_key, BEFORE_EVERY_TEST)
    StoredPasses(trained, offer).keep_papers(Papers((member_pass,)))
    state = states_of(trained, offer.run_id)[0].generation.outer_step
    where = ("run", "branch", offer.run_id, "--yes", "--json", "--data-dir", trained, "--outer-step", state)
    StoredPasses(trained, offer).remove(owner, removed.wallet_id)
    done = neuroshard(*where)
    assert done.code == 0, done.err
    (start,) = founded_branch(trained, done.json()["run_id"]).stages
    assert [each.wallet_id for each in start.candidates] == [kept.wallet_id]
    (saved,) = [each for each in find_stage_folders(trained) if each.parent.name == offer.run_id]
    layers = states_of(trained, offer.run_id)[0].layers
    shutil.copytree(saved, stage_folder(trained, kept.wallet_id, offer.run_id, layers))
    done = neuroshard(*where, "--token", "01" * 32)
    assert done.code == 0, done.err
    (start,) = founded_branch(trained, done.json()["run_id"]).stages
    assert start.candidates == ()


def serves(status: dict[str, Any], run_id: str) -> bool:
    return status["run"] is not None and status["run"]["run_id"] == run_id


def test_the_members_follow_a_rollback_of_the_owner(
    small_genesis: Path, quick: list[str], saving_often: Mapping[str, str], tmp_path: Path
) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    friends_seats = with_voters(run, tmp_path)
    with nodes_of(run, quick, tmp_path, saving_often) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        address = status["network"]["addresses"][0]
        friends = [start(number, address) for number in (1, 2)]
        for node in (owner, *friends):
            node.wait_for("a round of all", lambda status: status["diloco"]["members"] == 3, LONGEST_SECONDS)
        reached = owner.get("/api/status")["diloco"]["outer_steps"]
        owner.wait_for("more rounds", lambda status: status["diloco"]["outer_steps"] >= reached + 4, LONGEST_SECONDS)
        assert owner.stop() == 0
        friends[1].kill()  # it is away when the others follow
        chosen = states_of(run.data_dir, run.run_id)[0].generation.outer_step
        where = ("--outer-step", chosen, "--data-dir", run.data_dir)
        done = neuroshard("run", "rollback", run.run_id, "--yes", "--json", *where)
        assert done.code == 0, done.err
        new = done.json()["run_id"]
        foundation = founded_branch(run.data_dir, new)
        (founded,) = foundation.stages
        assert (len(founded.committee.seats), list(founded.candidates)) == (1, friends_seats)
        assert len(foundation.deputies) == 1

        owner = start(0)  # still with --run and the id of the old run
        owner.wait_for("the new run", lambda status: serves(status, new), LONGEST_SECONDS)
        friends[0].wait_for("the new run", lambda status: serves(status, new), LONGEST_SECONDS)
        friends[1] = start(2, address)
        for node in (owner, *friends):
            node.wait_for(
                "a round in the new run",
                lambda status: (
                    serves(status, new)
                    and status["diloco"]["members"] >= 2
                    and status["diloco"]["outer_steps"] > chosen
                ),
                LONGEST_SECONDS,
            )
        # their work of the old run counts: nobody waits for half an hour
        seats = {owner.get("/api/status")["wallet_id"], *(each.wallet_id for each in friends_seats)}
        until("seats of all", lambda: set(voters(friends[0])) == seats)
        old = find_run(tmp_path / "node-1", RunId(run.run_id))
        assert old is not None
        assert old.parameters.successor == new
        assert states_of(tmp_path / "node-1", run.run_id)  # nothing of the old run is deleted
