"""`run rollback` of a run in stages: the owner's disk has one stage, and nodes send the state of the other."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import TOKEN, NodeProcess
from neuroshard.identity import Wallet, parse_token
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.stored_runs import find_run
from neuroshard.state.checkpoint_catalogue import saved_stages
from neuroshard.state.checkpoint_store import search_stage_folders
from neuroshard.state.tensor_file import map_tensor_file
from neuroshard.types import RunId
from tests.node.test_assembling_processes import list_archived
from tests.worlds.commands import Outcome
from tests.worlds.processes import LONGEST_SECONDS, Run, made, neuroshard, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STAGED = """
num_stages = 2
batch_size = 1
sequences_per_step = 4
inner_steps = 5
architecture = { depth = 2, sequence_length = 64 }
"""
ARCHIVING = {"NEUROSHARD_ARCHIVE": "true", "NEUROSHARD_ARCHIVE_EVERY": "1"}


def rolled_back(run: Run, at: str, *arguments: object) -> Outcome:
    where = ("--at", at, "--yes", "--json", "--data-dir", run.data_dir)
    return neuroshard("run", "rollback", run.run_id, *where, *arguments)


def foundation_roots(run: Run, run_id: str) -> list[str | None]:
    offer = find_run(run.data_dir, RunId(run_id))
    assert offer is not None
    (signed,) = StoredFoundations(run.data_dir).read(offer).highest
    return [start.root for start in signed.foundation.stages]


def wait_for_steps(nodes: Sequence[NodeProcess], run_id: str, least: int) -> None:
    def are_there(status: dict[str, Any]) -> bool:
        is_there = status["run"] is not None and status["run"]["run_id"] == run_id
        return is_there and bool(status["diloco"]["outer_steps"] >= least)

    for node in nodes:
        node.wait_for(f"{least} steps of run {run_id[:16]}", are_there, LONGEST_SECONDS)


@pytest.mark.long
def test_an_owner_rolls_back_with_states_that_only_other_nodes_have(
    small_genesis: Path, quick: list[str], saving_often: Mapping[str, str], tmp_path: Path
) -> None:
    run, states = made(STAGED, small_genesis, tmp_path), tmp_path / "states"
    with nodes_of(run, [*quick, "--max-stages", "1"], tmp_path, {**saving_often, **ARCHIVING}) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        address = status["network"]["addresses"][0]
        other = start(1, address)
        wait_for_steps([owner, other], run.run_id, 3)
        until("an archive of each stage", lambda: len(list_archived([owner, other])) == 2)
        at = time.strftime("%Y-%m-%dT%H:%M:%S")
        time.sleep(1.0)  # `--at` has whole seconds
        reached = other.get("/api/status")["diloco"]["outer_steps"]
        wait_for_steps([owner, other], run.run_id, reached + 2)
        where = ("--out", states, "--peer", address, "--data-dir", tmp_path / "assembler")
        collected = neuroshard(
            "checkpoint", "assemble", "--run", run.run_id, "--at", at, "--json", "--wait", 60, *where
        )
        assert collected.code == 0, collected.err
        roots = [stage["root"] for stage in collected.json()["stages"]]
        assert len(roots) == 2
        assert owner.stop() == 0
        mine = owner_layers(run)
        shutil.rmtree(run.data_dir / "copies", ignore_errors=True)

        refused = rolled_back(run, at)
        assert refused.code == 2
        assert f"`neuroshard checkpoint assemble --run {run.run_id} --at {at} --out FOLDER`" in refused.err
        assert "--states FOLDER" in refused.err
        empty = rolled_back(run, at, "--states", tmp_path / "nothing")
        assert (empty.code, "has no states of run" in empty.err) == (2, True)
        damaged = damaged_copy(states, tmp_path / "damaged")
        assert "archived certificate cannot be read" in rolled_back(run, at, "--states", damaged).err

        done = rolled_back(run, at, "--states", states)
        assert done.code == 0, done.err
        new = done.json()["run_id"]
        found = foundation_roots(run, new)
        index = mine[0][0]  # the owner's own stage may be of a later moment, with steps that are not certified
        assert (found[1 - index], len(found)) == (roots[1 - index], 2)
        has_the_tensors_and_no_moments(run, states, new, 1 - index)

        owner = start(0)
        wait_for_steps([owner, other], new, done.json()["stages"][index]["outer_step"] + 1)


def owner_layers(run: Run) -> list[list[int]]:
    stages = saved_stages([each for each in search_stage_folders(run.data_dir) if each.parent.name == run.run_id])
    layers = sorted({(stage.layers.start, stage.layers.stop) for stage in stages})
    assert len(layers) == 1  # of two stages
    return [list(each) for each in layers]


def damaged_copy(states: Path, target: Path) -> Path:
    """The collected states with certificates that are none."""
    shutil.copytree(states, target)
    for path in target.rglob("certificate.msgpack"):
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    for path in target.rglob("chain.msgpack"):
        path.unlink()
    return target


def has_the_tensors_and_no_moments(run: Run, states: Path, run_id: str, index: int) -> None:
    """The stage that the owner did not have: the collected tensors, and moments of zero."""
    (collected,) = [each for each in saved_stages(search_stage_folders(states)) if each.layers.start == index]
    (copy,) = saved_stages(list((run.data_dir / "copies" / run_id).iterdir()))
    first, tensors = (map_tensor_file(each.tensor_file, each.manifest.tensors.sha256) for each in (collected, copy))
    moments = {name for name in tensors if name.startswith("inner/")}
    assert tensors.keys() - moments == first.keys()
    assert moments
    for name, tensor in tensors.items():
        assert bool((tensor == (0 if name in moments else first[name])).all()), name
    wallet = Wallet.from_secret(parse_token(TOKEN)).wallet_id
    assert json.loads(Path(copy.generation.path).read_text("utf-8"))["content"]["meta"]["wallet_id"] == wallet
