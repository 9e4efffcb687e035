"""The table `architecture` of a run's file: options, names of other programs, and mistakes in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import UsageError
from neuroshard.identity import RunParametersError, run_parameters_from_json, run_parameters_to_json
from neuroshard.runs.run_file import new_parameters, read_run_config
from neuroshard.types import Architecture

PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512)
SIZES = Architecture(64, 4, 4, 2, 192, 600, 32, 500_000.0, 1e-6)


def parameters_of(folder: Path, text: str) -> RunParameters:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return new_parameters(read_run_config(folder / "run.toml"), PINS)


def test_options_reach_the_signed_document_and_plain_ones_are_left_out(tmp_path: Path) -> None:
    plain = parameters_of(tmp_path, "architecture = { depth = 4 }")
    explicit = """
    [architecture]
    depth = 4
    qk_norm = "none"
    norm_reorder = false
    trainable_rmsnorm = true
    initialisation = "fan_in"
    """
    same = parameters_of(tmp_path, explicit)
    assert run_parameters_to_json(same) == run_parameters_to_json(plain)
    used = "qk_norm = 'width'\nnorm_reorder = true\ntrainable_rmsnorm = false\ninitialisation = 'depth'"
    made = parameters_of(tmp_path, f"[architecture]\ndepth = 4\n{used}")
    options = {"qk_norm": "width", "norm_reorder": True, "trainable_rmsnorm": False, "initialisation": "depth"}
    written, before = run_parameters_to_json(made)["architecture"], run_parameters_to_json(plain)["architecture"]
    assert isinstance(before, dict)
    assert written == {**before, **options}
    assert run_parameters_from_json(run_parameters_to_json(made)) == made


def test_names_of_other_programs_mean_the_same_model(tmp_path: Path) -> None:
    ours = """
    [architecture]
    hidden_size = 64
    layer_count = 4
    head_count = 4
    key_value_head_count = 2
    feed_forward_size = 192
    vocabulary_size = 600
    sequence_length = 32
    rope_theta = 500_000
    norm_epsilon = 1e-6
    qk_norm = "head"
    initialisation = "depth"
    """
    theirs = """
    [architecture]
    hidden_dim = 64
    n_layers = 4
    n_heads = 4
    n_kv_heads = 2
    ffn_dim_multiplier = 1.1
    multiple_of = 64
    vocab_size = 600
    max_seq_len = 32
    rope_theta = 500_000
    norm_eps = 1e-6
    qk_norm = true
    depth_init = true
    """
    expected = replace(SIZES, qk_norm="head", initialisation="depth")
    assert parameters_of(tmp_path, ours).architecture == parameters_of(tmp_path, theirs).architecture == expected
    off = theirs.replace("qk_norm = true", "qk_norm = false").replace("depth_init = true", "depth_init = false")
    assert parameters_of(tmp_path, off).architecture == SIZES


@pytest.mark.parametrize(
    ("width", "multiplier", "multiple", "size"),
    [(4_096, 1.3, 1_024, 14_336), (1_536, 1.3, 1_024, 6_144), (5_120, 1.3, 1_024, 18_432), (64, 1, 1, 170)],
)
def test_feed_forward_sizes_follow_from_multipliers(
    tmp_path: Path, width: int, multiplier: float, multiple: int, size: int
) -> None:
    text = f"[architecture]\ndepth = 4\nhidden_dim = {width}\nn_heads = 8\nn_kv_heads = 8\n"
    made = parameters_of(tmp_path, f"{text}ffn_dim_multiplier = {multiplier}\nmultiple_of = {multiple}")
    assert made.architecture.feed_forward_size == size


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("qk_norm = 'heads'", "Expected one of none, head, width"),
        ("norm_reorder = 1", r"Expected `bool`.*norm_reorder"),
        ("initialisation = 'normal'", "Expected one of fan_in, depth"),
        ("depth_init = 'yes'", "depth_init must be true or false"),
        ("depth_init = true\ninitialisation = 'depth'", "depth_init and initialisation, which mean the same"),
        ("n_layers = 4\nlayer_count = 4", "n_layers and layer_count, which mean the same"),
        ("feed_forward_size = 64\nmultiple_of = 8", "feed_forward_size and also ffn_dim_multiplier or multiple_of"),
        ("ffn_dim_multiplier = inf", "ffn_dim_multiplier must be a number above 0"),
        ("ffn_dim_multiplier = nan", "ffn_dim_multiplier must be a number above 0"),
        ("ffn_dim_multiplier = true", "ffn_dim_multiplier must be a number above 0"),
        ("multiple_of = 0", "multiple_of must be a whole number in 1"),
        ("hidden_size = 'wide'\nmultiple_of = 8", "need hidden_size, a whole number"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, entries: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parameters_of(tmp_path, f"[architecture]\ndepth = 4\n{entries}")


def test_a_signed_document_with_an_unknown_option_is_refused(tmp_path: Path) -> None:
    written = dict(run_parameters_to_json(parameters_of(tmp_path, "architecture = { depth = 4 }")))
    architecture = written["architecture"]
    assert isinstance(architecture, dict)
    for option in ({"qk_norm": "heads"}, {"norm_reorder": "yes"}, {"norms": 3}):
        with pytest.raises(RunParametersError):
            run_parameters_from_json({**written, "architecture": {**architecture, **option}})
