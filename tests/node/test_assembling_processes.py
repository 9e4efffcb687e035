"""`neuroshard checkpoint assemble`: a computer that holds no stage gets all stages of a run of real processes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.node_process import NodeProcess
from benchmarks.organiser_process import running_organiser
from neuroshard.identity.admissions import read_admission
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema
from neuroshard.runs.admission_keeper import admission_file
from neuroshard.runs.stored_runs import read_offer_file
from neuroshard.state.checkpoint_catalogue import SavedStage, choose, saved_stages
from neuroshard.state.checkpoint_store import search_stage_folders
from neuroshard.state.kept_states import ARCHIVE_FOLDER
from neuroshard.state.stage_tensors import ANCHOR
from neuroshard.state.tensor_file import map_tensor_file
from tests.worlds.commands import Outcome
from tests.worlds.processes import LONGEST_SECONDS, Run, made, neuroshard, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STAGES = 3
STAGED = f"""
num_stages = {STAGES}
batch_size = 1
sequences_per_step = 4
inner_steps = 5
architecture = {{ depth = {STAGES}, sequence_length = 64 }}
"""
ARCHIVING = {"NEUROSHARD_ARCHIVE": "true", "NEUROSHARD_ARCHIVE_EVERY": "1"}


def assembled(run: Run, out: Path, address: str, *arguments: object) -> Outcome:
    """Assemble with the wallet of the run's owner, on a node of its own."""
    where = ("--out", out, "--peer", address, "--data-dir", out.parent / "assembler")
    return neuroshard("checkpoint", "assemble", "--run", run.run_id, *where, *arguments)


def collected_in(out: Path) -> tuple[SavedStage, ...]:
    return choose(saved_stages(search_stage_folders(out))).require_whole()


def own_states(nodes: Sequence[NodeProcess], wanted: Sequence[dict[str, Any]]) -> list[SavedStage]:
    """The nodes' own files of the states that were assembled: archived, among the checkpoints, or copies."""
    found = list[SavedStage]()
    for stage in wanted:
        name = f"layers-{stage['layers'][0]}-{stage['layers'][1]}"
        here = [path for node in nodes for path in (node.data_dir / "checkpoints", node.data_dir / "copies")]
        folders = [folder for path in here for folder in path.rglob(name)]
        archives = [path for folder in folders for path in folder.glob(f"{ARCHIVE_FOLDER}/*")]
        saved = saved_stages([*archives, *folders])
        found.append(next(one for one in saved if one.generation.outer_step == stage["outer_step"]))
    return found


def logits_of(model: StageModel) -> Tensor:
    tokens = torch.randint(0, model.architecture.vocabulary_size, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.logits(model(tokens))


def model_of(stages: Sequence[SavedStage], *, from_anchor: bool) -> StageModel:
    """The whole model: from the anchors of its stages, or from their weights."""
    model = StageModel(stages[0].architecture)
    parameters = dict(model.named_parameters())
    for stage in stages:
        tensors = map_tensor_file(stage.tensor_file, stage.manifest.tensors.sha256)
        schema = TensorSchema.of(StageModel(stage.architecture, stage.layers))
        named = schema.views(tensors[ANCHOR])
        weights = named if from_anchor else {name: tensors[f"model/{name}"] for name in schema.names}
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name].copy_(tensor)
    return model


def list_archived(nodes: Sequence[NodeProcess]) -> set[str]:
    """The stages of which a node has archived a state."""
    return {
        file.parents[2].name
        for node in nodes
        for file in node.data_dir.glob(f"checkpoints/*/*/*/{ARCHIVE_FOLDER}/*/certificate.msgpack")
    }


def outer_steps(nodes: Sequence[NodeProcess], least: int) -> None:
    for node in nodes:
        node.wait_for("outer steps", lambda status: status["diloco"]["outer_steps"] >= least, LONGEST_SECONDS)


@pytest.mark.long
def test_a_computer_without_a_stage_assembles_the_model(
    small_genesis: Path, quick: list[str], saving_often: Mapping[str, str], tmp_path: Path
) -> None:
    run = made(STAGED, small_genesis, tmp_path)
    variables = {**saving_often, **ARCHIVING}
    with nodes_of(run, [*quick, "--max-stages", "1"], tmp_path, variables) as start:
        first = start(0)
        status = first.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        address = status["network"]["addresses"][0]
        nodes = [first, *(start(number, address) for number in range(1, STAGES))]
        outer_steps(nodes, 3)
        until("an archive of each stage", lambda: len(list_archived(nodes)) == STAGES)
        moment = int(time.time())  # `--at` includes the whole second
        latest = max(node.get("/api/status")["diloco"]["outer_steps"] for node in nodes)
        outer_steps(nodes, latest + 4)  # most ordinary checkpoints of that time are gone
        holds_the_model_of_a_time(run, nodes, address, moment, tmp_path / "earlier")
        last = nodes.pop()
        status = last.get("/api/status")
        last.kill()
        from_copy = assembled(run, tmp_path / "copy", address, "--json")
        assert from_copy.code == 0, from_copy.err
        for node in nodes:
            shutil.rmtree(node.data_dir / "copies", ignore_errors=True)  # one of them keeps it
        out = tmp_path / "model.states"  # where `export --from-run` looks for them
        missing = assembled(run, out, address, "--wait", "8")
        assert missing.code == 5
        assert f"Layer {status['layers']['stop']} is missing." in missing.err
        assert status["node_id"] in missing.err
        kept = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
        assert len(kept) == STAGES - 1
        start(STAGES - 1, address)
        where = ("--run", tmp_path / "signed.json", "--peer", address, "--data-dir", tmp_path / "assembler")
        again = neuroshard("checkpoint", "export", "--from-run", *where, "--out", tmp_path / "model", "--json")
        assert again.code == 0, again.err
        assert {file: file.stat().st_mtime_ns for file in kept} == kept
        assert len(again.json()["stages"]) == STAGES
        assert (tmp_path / "model" / "model.safetensors").exists()


def holds_the_model_of_a_time(run: Run, nodes: Sequence[NodeProcess], address: str, moment: int, out: Path) -> None:
    """Its logits are those of the model that the nodes' own states make, and exports have them too."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment))
    for node in nodes:
        node.post("/api/training/pause")  # or newer checkpoints would replace the states that are compared
    past = assembled(run, out, address, "--at", at, "--json")
    assert past.code == 0, past.err
    stages = past.json()["stages"]
    assert [stage["layers"] for stage in stages] == [[layer, layer + 1] for layer in range(STAGES)]
    assert all(stage["certified_at"] < moment + 1 for stage in stages)
    theirs = own_states(nodes, stages)
    for node in nodes:
        node.post("/api/training/resume")
    ours = collected_in(out)
    assert [stage.generation.outer_step for stage in ours] == [stage["outer_step"] for stage in stages]
    assert torch.equal(logits_of(model_of(ours, from_anchor=False)), logits_of(model_of(theirs, from_anchor=True)))
    for kind in ("hf", "dcp"):
        exported = neuroshard("checkpoint", "export", "--from", out, "--format", kind, "--out", out.parent / kind)
        assert exported.code == 0, exported.err
    assert (out.parent / "hf" / "tokenizer.json").exists()  # the nodes of the run sent it
    too_early = assembled(run, out.parent / "before", address, "--at", "2020-01-01", "--wait", "4")
    assert too_early.code == 5
    assert "The oldest state that a node keeps is outer step" in too_early.err


ORGANISED = """admission = "admitted"
architecture = { depth = 2, sequence_length = 64 }
num_stages = 2
batch_size = 1
inner_steps = 5
"""


@pytest.mark.long
def test_an_organiser_lets_a_computer_assemble_and_others_stay_out(
    small_genesis: Path, quick: list[str], saving_often: Mapping[str, str], tmp_path: Path
) -> None:
    run = made(ORGANISED, small_genesis, tmp_path)
    with nodes_of(run, quick, tmp_path, saving_often) as start:
        owner = start(0)
        outer_steps([owner], 3)
        address = owner.get("/api/status")["network"]["addresses"][0]
        stranger = ("--token", "07" * 32)
        refused = assembled(run, tmp_path / "refused", address, *stranger, "--wait", "20")
        assert (refused.code, "--organiser URL" in refused.err) == (2, True)
        with running_organiser(run.data_dir, tmp_path / "signed.json") as organiser:
            done = assembled(run, tmp_path / "out", address, *stranger, "--organiser", organiser.url, "--json")
            assert done.code == 0, done.err
            assert len(done.json()["stages"]) == len(collected_in(tmp_path / "out")) == 2
        offer = read_offer_file(tmp_path / "signed.json")
        kept = admission_file(tmp_path / "assembler", offer).read()
        assert kept is not None
        authorities = [bytes.fromhex(key) for key in offer.parameters.authority]
        assert read_admission(kept.admission, offer.run_id, authorities).stage == "trainer"  # it took no stage's place
