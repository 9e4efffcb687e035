"""The models that ship with the program: sizes, parameters and stages of the organised runs, to the last number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import UsageError
from neuroshard.model.architecture import parameter_count, plan_of
from neuroshard.model.named_configs import config_names
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema
from neuroshard.pipeline.stage_protocol import WirePrecision, wire_bytes
from neuroshard.runs.run_file import model_warnings, new_parameters, read_run_config
from neuroshard.types import Architecture

PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512)


class Model(NamedTuple):
    """A row of the table in section 3.6b of the design, with exact numbers of parameters."""

    width: int
    layers: int
    heads: int
    feed_forward: int
    vocabulary: int
    length: int
    stages: tuple[int, ...]
    dense: int
    head: int  # parameters of the first stage
    body: int  # of the second
    tail: int  # of the last
    rank: int  # of the subspace
    free: int  # blocks
    billions: float  # parameters that are trained in the subspace, as the table has them


MODELS = {
    "llama_8B_C": Model(
        4_096,
        32,
        32,
        14_336,
        50_265,
        4_096,
        (1,) * 32,
        7_391_096_832,
        423_989_248,
        218_103_808,
        423_993_344,
        40,
        1,
        4.870,
    ),
    "reparam_500M": Model(
        1_536,
        16,
        16,
        6_144,
        50_265,
        1_024,
        (4,) * 4,
        720_646_656,
        218_764_800,
        141_557_760,
        218_766_336,
        30,
        4,
        0.506,
    ),
    "reparam_1B_C": Model(
        2_048,
        16,
        32,
        7_168,
        128_256,
        2_048,
        (3, 4, 4, 5),
        1_397_753_856,
        426_246_144,
        218_103_808,
        535_300_096,
        40,
        5,
        0.937,
    ),
    "reparam_5B_C": Model(
        4_096,
        32,
        32,
        14_336,
        128_256,
        4_096,
        (8,) * 4,
        8_029_999_104,
        2_270_167_040,
        1_744_830_464,
        2_270_171_136,
        40,
        8,
        5.716,
    ),
    "reparam_8B_C": Model(
        5_120,
        32,
        40,
        18_432,
        128_256,
        4_096,
        (6, 5, 5, 5, 5, 6),
        12_386_309_120,
        2_732_851_200,
        1_730_150_400,
        2_732_856_320,
        51,
        6,
        8.632,
    ),
    "reparam_13B_C": Model(
        5_120,
        50,
        40,
        18_432,
        128_256,
        4_096,
        (*(4,) * 12, 2),
        18_614_850_560,
        2_040_791_040,
        1_384_120_320,
        1_348_736_000,
        51,
        2,
        12.234,
    ),
}
each_model = pytest.mark.parametrize("name", MODELS)


def parameters_of(folder: Path, text: str) -> RunParameters:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return new_parameters(read_run_config(folder / "run.toml"), PINS)


def named(folder: Path, name: str, entries: str = "", rest: str = "") -> RunParameters:
    return parameters_of(folder, f'{rest}\narchitecture = {{ config = "{name}"{entries} }}')


def test_these_models_ship() -> None:
    assert config_names() == tuple(sorted(MODELS))


@each_model
def test_sizes_options_and_stages_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    expected, made = MODELS[name], named(tmp_path, name)
    assert made.architecture == Architecture(
        hidden_size=expected.width,
        layer_count=expected.layers,
        head_count=expected.heads,
        key_value_head_count=8,
        feed_forward_size=expected.feed_forward,
        vocabulary_size=expected.vocabulary,
        sequence_length=expected.length,
        rope_theta=500_000.0,
        norm_epsilon=1e-5,
        qk_norm="head",
        norm_reorder=True,
        trainable_rmsnorm=False,
        initialisation="depth",
        subspace_rank=expected.rank,
        free_blocks=expected.free,
    )
    assert tuple(len(layers) for layers in plan_of(made)) == expected.stages
    assert (made.stage_count, made.sequences_per_step) == (len(expected.stages), 32)


@each_model
def test_dense_parameters_are_counted_on_the_meta_device(name: str, tmp_path: Path) -> None:
    expected, made = MODELS[name], named(tmp_path, name, ", use_compression = false")
    plan = plan_of(made)
    with torch.device("meta"):
        counts = [TensorSchema.of(StageModel(made.architecture, layers)).total_size for layers in plan]
    assert sum(counts) == parameter_count(made.architecture) == expected.dense
    assert (counts[0], counts[1], counts[-1]) == (expected.head, expected.body, expected.tail)
    assert counts == [parameter_count(made.architecture, layers) for layers in plan]


@each_model
def test_the_subspace_leaves_as_many_parameters_to_train_as_the_table_says(name: str, tmp_path: Path) -> None:
    expected, made = MODELS[name], named(tmp_path, name)
    counts = [parameter_count(made.architecture, layers) for layers in plan_of(made)]
    assert sum(counts) == parameter_count(made.architecture)
    assert round(sum(counts) / 1e9, 3) == expected.billions
    with torch.device("meta"):
        tail = StageModel(made.architecture, plan_of(made)[-1])
    assert TensorSchema.of(tail).total_size == counts[-1]


@each_model
def test_bytes_of_a_token_at_each_edge(name: str) -> None:
    width = MODELS[name].width
    found = [wire_bytes(1, width, WirePrecision(precision)) for precision in ("fp32", "bf16", "int8")]
    assert found == [4 * width, 2 * width, width + width // 16]


def test_entries_beside_the_name_replace_its_own(tmp_path: Path) -> None:
    plain = named(tmp_path, "reparam_500M")
    changed = named(
        tmp_path,
        "reparam_500M",
        ", sequence_length = 256, trainable_rmsnorm = false, norm_reorder = false, hidden_dim = 1024",
    )
    assert (changed.architecture.sequence_length, changed.architecture.norm_reorder) == (256, False)
    assert changed.architecture.feed_forward_size == 4_096  # 1.3 times 2,730, up to the next multiple of 1,024
    assert changed.stage_layers == plain.stage_layers
    exact = named(tmp_path, "reparam_500M", ", feed_forward_size = 5_000")
    assert exact.architecture.feed_forward_size == 5_000
    dense = named(tmp_path, "reparam_500M", ", subspace_rank = 0")
    assert (dense.architecture.subspace_rank, dense.architecture.free_blocks) == (0, 0)
    assert named(tmp_path, "reparam_500M", ", subspace_rank = 64").architecture.subspace_rank == 64
    assert plan_of(named(tmp_path, "reparam_500M", rest="num_stages = 3")) == plan_of(
        named(tmp_path, "reparam_500M", rest="stage_layers = [6, 5, 5]")
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ('config = "reparam_8B"', r"'reparam_8B' is not a model.*Near names: reparam_8B_C"),
        ('config = "zzz"', "Known are: llama_8B_C, reparam_13B_C"),
        ('config = "../weights"', "is not a model that ships"),
        ("config = 8", "config = 8 is not a model that ships"),
        ('config = "reparam_500M", depth = 4', "config and depth"),
        ('config = "reparam_500M", n_layers = 17', "the stages have 16 layers in all, but layer_count is 17"),
        ('config = "reparam_500M", n_heads = 7', "head_count must divide hidden_size"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, entries: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parameters_of(tmp_path, f"architecture = {{ {entries} }}")
    assert re.search(words, f"{caught.value.message} {caught.value.action}")


def test_other_programs_cannot_read_them() -> None:
    formats, learning = model_warnings({"architecture": {"config": "llama_8B_C"}})
    assert "subspace_rank = 40 sends" in learning
    assert "formats hf and gguf cannot" in formats
