"""Stages that were trained and saved apart, assembled into one model for other programs."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import anyio
import pytest
import torch
import trio
from safetensors.torch import load_file
from torch import Tensor

from neuroshard.errors import CheckpointError, StorageError
from neuroshard.model.llama_layout import to_llama_state_dict
from neuroshard.model.transformer import KeyValueCache, StageModel
from neuroshard.model.weights import TensorSchema, flatten
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.checkpoint_catalogue import DamagedStageError, SavedStage, choose, saved_stages
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.export import export_huggingface, export_torch
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import ARCHITECTURE, windows
from tests.worlds.trainers import make_split_trainer


@pytest.fixture
def trained(compute: ComputeThread, tmp_path: Path) -> Trainer:
    """Has trained its three stages for a few steps and saved them."""
    trainer = make_split_trainer(compute, tmp_path / "stages")
    trio.run(trainer.run, 3)
    return trainer


@pytest.fixture
def saved(trained: Trainer, tmp_path: Path) -> list[SavedStage]:
    """What it saved."""
    assert trained.steps == 3
    return saved_stages((tmp_path / "stages").iterdir())


def test_the_hugging_face_folder_holds_exactly_the_weights_of_the_stages(
    trained: Trainer, saved: list[SavedStage], tmp_path: Path
) -> None:
    export_huggingface(choose(saved).require_whole(), tmp_path / "out" / "model")
    exported = load_file(tmp_path / "out" / "model" / "model.safetensors")
    expected: dict[str, Tensor] = {}
    for stage in trained.parts.stages:
        expected |= to_llama_state_dict(stage.executor.model)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == ARCHITECTURE.layer_count
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_after_a_round_of_several_the_mean_of_their_weights_is_exported(compute: ComputeThread, tmp_path: Path) -> None:
    trainer = make_split_trainer(compute, tmp_path / "stages")

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.run)
            while trainer.steps < 2:
                await anyio.sleep(0.001)
            trainer.pause()
            await trainer.wait_until_paused()
            for number, stage in enumerate(trainer.parts.stages):
                outer, own = stage.outer, flatten(stage.executor.model)
                velocity = torch.full_like(own, 2.0)
                outer.replace_state(replace(outer.state, anchor=own + number, velocity=velocity))
                outer.progress = replace(outer.progress, members=3, lead=0.25)
            await trainer.save_now()
            trainer.stop()

    trio.run(scenario)
    export_huggingface(choose(saved_stages((tmp_path / "stages").iterdir())).require_whole(), tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    for number, stage in enumerate(trainer.parts.stages):
        for name, own in to_llama_state_dict(stage.executor.model).items():
            torch.testing.assert_close(exported[name], own + number + 0.5, rtol=0, atol=1e-6)


def test_the_exported_model_gives_the_logits_of_the_stages_one_after_the_other(
    trained: Trainer, saved: list[SavedStage], tmp_path: Path
) -> None:
    export_huggingface(choose(saved).require_whole(), tmp_path / "model")
    whole = read_llama(load_file(tmp_path / "model" / "model.safetensors"))
    activations = tokens = windows(3, 4)[:, :-1]
    with torch.no_grad():
        for stage in trained.parts.stages:
            activations = forward(stage.executor.model, activations)
        expected = trained.parts.stages[-1].executor.model.logits(activations)
        assert torch.equal(whole.logits(forward(whole, tokens)), expected)


def read_llama(weights: dict[str, Tensor]) -> StageModel:
    """Our model from that layout: packed matrices are the parts one below the other."""
    model = StageModel(ARCHITECTURE)
    for name, parameter in model.named_parameters():
        parts = [weights[part] for part in to_llama_names(name)]
        with torch.no_grad():
            parameter.copy_(torch.cat(parts))
    return model


def to_llama_names(name: str) -> list[str]:
    if name in ("embedding.weight", "head.weight"):
        return [{"e": "model.embed_tokens.weight", "h": "lm_head.weight"}[name[0]]]
    replaced = {
        "attention_norm": ["input_layernorm"],
        "attention.query_key_value": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.output": ["self_attn.o_proj"],
        "feed_forward_norm": ["post_attention_layernorm"],
        "feed_forward.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "feed_forward.down": ["mlp.down_proj"],
    }
    for ours, theirs in replaced.items():
        if f".{ours}." in name:
            return [f"model.{name.replace(ours, part)}" for part in theirs]
    return [f"model.{name}"]


def forward(model: StageModel, inputs: Tensor) -> Tensor:
    return cast("Callable[[Tensor, KeyValueCache | None], Tensor]", model)(inputs, None)


def test_the_classic_file_holds_the_stages_as_if_one_node_had_held_them(
    trained: Trainer, saved: list[SavedStage], tmp_path: Path
) -> None:
    export_torch(choose(saved).require_whole(), tmp_path / "model.pt")
    classic = torch.load(tmp_path / "model.pt", weights_only=True)
    assert classic["layer_ids"] == [0, 1, 2]
    assert classic["training_rounds"] == 3
    assert [part["layer_ids"] for part in classic["stages"]] == [[0], [1], [2]]
    schema = TensorSchema.of(StageModel(ARCHITECTURE))
    anchor = schema.views(classic["diloco"]["anchor"])
    for stage in trained.parts.stages:
        views = TensorSchema.of(stage.executor.model).views(stage.outer.state.anchor)
        for name, parameter in stage.executor.model.named_parameters():
            place, _, rest = name.removeprefix("layers.").partition(".")
            held = classic["layers"][int(place)][rest] if place.isdigit() else classic["outside_layers"][name]
            assert torch.equal(held, parameter)
            assert torch.equal(anchor[name], views[name])
            assert classic["optimizer"]["state"][name]["step"].item() == 3


def test_a_damaged_stage_is_named_and_nothing_is_left(saved: list[SavedStage], tmp_path: Path) -> None:
    stages = choose(saved).require_whole()
    file = stages[1].tensor_file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for attempt in (export_huggingface, export_torch):
        with pytest.raises(DamagedStageError, match=r"step-3\.json is damaged") as error:
            attempt(stages, tmp_path / "out" / "model")
        assert error.value.stage is stages[1]
        assert not list((tmp_path / "out").glob("*"))


def test_nothing_is_overwritten_and_parts_are_refused(saved: list[SavedStage], tmp_path: Path) -> None:
    kept = tmp_path / "model" / "kept"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(StorageError, match="not empty"):
        export_huggingface(choose(saved).require_whole(), tmp_path / "model")
    assert list(kept.parent.iterdir()) == [kept]
    with pytest.raises(CheckpointError, match=r"Layer 2 is missing"):
        choose([stage for stage in saved if stage.layers.start != 1]).require_whole()


def test_the_export_reads_no_tensor_as_a_whole(saved: list[SavedStage], tmp_path: Path) -> None:
    wide = replace(ARCHITECTURE, vocabulary_size=200_000)  # two matrices of 26 MB
    model = StageModel(wide)
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    staging = StagingBuffers(TensorLayout.of(tensors))
    staging.copy_from(tensors)
    meta = replace(saved[0].manifest.meta, architecture=wide, layers=model.layer_range)
    CheckpointStore(tmp_path / "wide").write(meta, staging)
    stages = saved_stages([tmp_path / "wide"])
    export_huggingface(choose(saved).require_whole(), tmp_path / "first")  # what is imported and kept the first time
    tracemalloc.start()
    try:
        export_huggingface(stages, tmp_path / "second")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "second" / "model.safetensors").stat().st_size > 50e6
    assert peak < 6e6
