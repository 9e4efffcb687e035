"""The table `architecture` of a run's file: options, names of other programs, and mistakes in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import UsageError
from neuroshard.identity import (
    RunParametersError,
    SignedRunParameters,
    TokenSecret,
    Wallet,
    run_parameters_from_json,
    run_parameters_to_json,
)
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.membership.swarm_view import Membership
from neuroshard.model.architecture import plan_of
from neuroshard.node.own_stages import windows_of
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.proposal import HardwareBudget
from neuroshard.runs.run_file import new_parameters, read_run_config
from neuroshard.types import Architecture, LayerRange
from tests.worlds.claims import identity_of

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


MODEL = "architecture = { depth = 12 }\n"


def ends_of(folder: Path, entries: str) -> list[int]:
    return [layers.stop for layers in plan_of(parameters_of(folder, entries + MODEL))]


def test_stages_have_the_layers_that_the_file_gives_them(tmp_path: Path) -> None:
    assert ends_of(tmp_path, "num_stages = 5\n") == [3, 6, 8, 10, 12]
    assert ends_of(tmp_path, "stage_layers = [1, 5, 6]\n") == [1, 6, 12]
    assert ends_of(tmp_path, "num_stages = 3\nstage_layers = [1, 5, 6]\n") == [1, 6, 12]
    parts = "num_hidden_layers_head = 2\nnum_hidden_layers_tail = {}\n"
    assert ends_of(tmp_path, f"num_stages = 5\nnum_hidden_layers_body = 3\n{parts.format(1)}") == [2, 5, 8, 11, 12]
    assert ends_of(tmp_path, f"num_stages = 2\n{parts.format(10)}") == [2, 12]
    made = parameters_of(tmp_path, f"num_stages = 2\n{parts.format(10)}{MODEL}")
    assert (made.stage_layers, made.sequences_per_step) == ((2, 10), 32)
    assert run_parameters_to_json(made)["stage_layers"] == [2, 10]
    assert run_parameters_from_json(run_parameters_to_json(made)) == made
    assert "stage_layers" not in run_parameters_to_json(parameters_of(tmp_path, MODEL))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("stage_layers = [1, 5, 5]", "the stages have 11 layers in all, but layer_count is 12"),
        ("num_stages = 2\nstage_layers = [1, 5, 6]", "stage_layers has 3 numbers, but there are 2 stages"),
        ("stage_layers = [12, 0]", r"stage_layers.*Expected `int` >= 1"),
        ("stage_layers = 'even'", r"stage_layers.*Expected `array`"),
        (f"stage_layers = {[1] * 129}", r"stage_layers.*length <= 128"),
        ("num_hidden_layers_head = 2\nnum_hidden_layers_tail = 10", "num_stages is missing"),
        ("num_stages = 2\nnum_hidden_layers_head = 2", "num_hidden_layers_tail is missing"),
        ("num_stages = 3\nnum_hidden_layers_head = 2\nnum_hidden_layers_tail = 2", "num_hidden_layers_body is missing"),
        (
            "num_stages = 4\nnum_hidden_layers_head = 2\nnum_hidden_layers_body = 4\nnum_hidden_layers_tail = 4",
            "the stages have 14 layers in all, but layer_count is 12",
        ),
        (
            "num_stages = 13\nnum_hidden_layers_head = 6\nnum_hidden_layers_body = 0\nnum_hidden_layers_tail = 6",
            "num_stages = 13 leaves 11 stages between head and tail, but num_hidden_layers_body = 0",
        ),
        ("stage_layers = [6, 6]\nnum_hidden_layers_head = 6", "both say which stage has which layers"),
        (
            "num_stages = 1000000000000\nnum_hidden_layers_head = 1\nnum_hidden_layers_body = 1",
            "more than the 128 unequal stages",
        ),
    ],
)
def test_cuts_that_do_not_add_up_are_refused_with_both_numbers(tmp_path: Path, entries: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parameters_of(tmp_path, f"{entries}\n{MODEL}")


def test_a_signed_document_whose_stages_do_not_add_up_is_refused(tmp_path: Path) -> None:
    written = dict(run_parameters_to_json(parameters_of(tmp_path, f"stage_layers = [1, 11]\n{MODEL}")))
    for layers in ([2, 11], [12], [4, 4, 4], [-1, 13]):
        with pytest.raises(RunParametersError, match="layers"):
            run_parameters_from_json({**written, "stage_layers": layers})


def test_a_computer_takes_the_stages_that_fit_it(tmp_path: Path) -> None:
    """Of stages with 1, 10 and 1 layers, 1,500 MB are enough for the small ones."""
    made = parameters_of(tmp_path, f"batch_size = 1\nstage_layers = [1, 10, 1]\n{MODEL}")
    room = HardwareBudget(tier_mb=1_500, device="cpu", device_tier_mb=None, flops_per_second=1e9)
    assert windows_of(made, room, None) == (StageRange(0, 1), StageRange(2, 3))


def test_a_node_works_with_the_stages_of_the_file(tmp_path: Path) -> None:
    made = parameters_of(tmp_path, f"stage_layers = [1, 10, 1]\n{MODEL}")
    owner = Wallet.from_secret(TokenSecret("hex", bytes(32)))
    offer, identity = RunOffer.of_new_run(SignedRunParameters.sign(owner, made)), identity_of(1)

    async def unused(*_: object) -> NoReturn:
        raise AssertionError("nothing is dialled here")

    membership = Membership(identity.node_id, identity.wallet_id)
    networking = Networking(identity.node_id, unused, peers_file=tmp_path / "peers", loopback_only=True)
    swarm = StageSwarm(identity, RunVersions(offer), membership, networking)
    assert swarm.plan == plan_of(made) == (LayerRange(0, 1), LayerRange(1, 11), LayerRange(11, 12))
