"""The file of a run: which names are known, what they lead to, and what the owner is told about a mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.errors import StorageError, UsageError
from neuroshard.identity import run_parameters_from_json, run_parameters_to_json
from neuroshard.model.architecture import architecture_for
from neuroshard.optim.schedule import scaled_learning_rate
from neuroshard.runs.run_file import NAMES, RunConfig, apply_config, new_parameters, read_run_config, recipe_warnings
from neuroshard.types import Architecture

PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512)
KEY = "ab" * 32
SEED = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
EVERYTHING = f"""
name = "friends"
num_stages = 2
stage_layers = [1, 1]
batch_size = 2
sequences_per_step = 16
initial_weights_seed = 3
inner_steps = 50
interval = "fixed"
round_share = 0.2
inner_optimizer = "muon"
inner_lr = 1e-3
beta1 = 0.8
beta2 = 0.99
weight_decay = 0
max_grad_norm = 2
warmup_steps = 5
schedule = "linear"
decay_steps = 500
final_fraction = 0.2
outer_lr = 0.5
outer_momentum = 0.8
outer_choice = "measured"
lone_outer = "apply"
aggregator = "median"
trim_fraction = 0.2
codec = "bf16"
strategy = "streaming"
averaging_target_batch_size = 1024
averager_rank = 0
max_round_seconds = 60
overlap = true
admission = "admitted"
authority = ["{KEY}"]
seeds = ["{SEED}"]
wire_precision = "int4"
wire_precision_gradients = "int8"
data_plane = "star"
routing = "lanes"
subspace_cache_mb = 9
subspace_sha256 = ""

[architecture]
hidden_size = 64
layer_count = 2
head_count = 2
key_value_head_count = 1
feed_forward_size = 128
vocabulary_size = 600
sequence_length = 32
rope_theta = 500
norm_epsilon = 1e-6
"""


# Written out from section 3.9 of the design: name and, where it gives one, the value.
CONTRACT = {
    "architecture": "{ depth = 4 }",
    "num_stages": "1",
    "inner_steps": "500",
    "inner_lr": "1e-4",
    "outer_lr": "0.7",
    "outer_momentum": "0.9",
    "max_grad_norm": "1.0",
    "trim_fraction": "0.1",
    "sequences_per_step": "4",
    "averaging_target_batch_size": "1024",
    "matchmaking_time": "45",
    "averaging_timeout": "120",
    "sparse_avg": "0.05",
    "average_state_every": "5",
    "max_allowed_stale": "7",
    "averager_rank": "0",
    "lone_outer": '"keep"',
    "routing": '"lanes"',
    "admission": '"friends"',
    "strategy": '"diloco"',
    "codec": '"int8"',
    "aggregator": '"trimmed_mean"',
    "max_round_seconds": "3600",
}
TO_COME = {"matchmaking_time", "averaging_timeout", "sparse_avg", "average_state_every", "max_allowed_stale"}


def read(folder: Path, text: str, name: str = "run.toml") -> RunConfig:
    (folder / name).write_text(text, encoding="utf-8")
    return read_run_config(folder / name)


def test_every_known_name_reaches_the_parameters(tmp_path: Path) -> None:
    config = read(tmp_path, EVERYTHING)
    assert {*NAMES, "architecture"} - config.keys() == {"holds_from_outer_step"}
    assert new_parameters(config, PINS) == RunParameters(
        name="friends",
        version=1,
        architecture=Architecture(64, 2, 2, 1, 128, 600, 32, 500.0, 1e-6),
        stage_count=2,
        batch_size=2,
        sequences_per_step=16,
        initial_weights_seed=3,
        genesis=PINS,
        inner=InnerOptimization(1e-3, 0.8, 0.99, 0.0, 2.0, 5, "linear", 500, 0.2, "muon"),
        outer=OuterOptimization(
            50,
            0.5,
            0.8,
            "apply",
            "median",
            0.2,
            "bf16",
            60.0,
            "streaming",
            overlap=True,
            interval="fixed",
            round_share=0.2,
            choice="measured",
        ),
        admission="admitted",
        authority=(KEY,),
        seeds=(SEED,),
        wire_precision="int4",
        wire_precision_gradients="int8",
        data_plane="star",
        routing="lanes",
        stage_layers=(1, 1),
        subspace_cache_mb=9,
    )


@pytest.mark.parametrize(("name", "value"), CONTRACT.items())
def test_every_name_of_the_contract_is_used_or_told_to_come_later(tmp_path: Path, name: str, value: str) -> None:
    text = f"{name} = {value}\n" + ("" if name == "architecture" else "architecture = { depth = 4 }")
    if name not in TO_COME:
        assert new_parameters(read(tmp_path, text), PINS).architecture == architecture_for(4, 512, 512)
        return
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert name in caught.value.message
    assert "is not in this version" in caught.value.message
    assert "Leave the name out" in caught.value.action


@pytest.mark.parametrize("entry", ['strategy = "diloco"', "sparse_avg = 0", "max_allowed_stale = 5", 'codec = "int4"'])
def test_what_this_version_does_anyway_may_be_said_and_makes_the_same_run(tmp_path: Path, entry: str) -> None:
    plain = "architecture = { depth = 4 }"
    assert new_parameters(read(tmp_path, f"{entry}\n{plain}"), PINS) == new_parameters(read(tmp_path, plain), PINS)


def test_values_that_come_later_are_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"sparse_avg: sparse averaging .* is not in this version"):
        read(tmp_path, "sparse_avg = false")


AVERAGING = """
strategy = "averaging"
aggregator = "mean"
codec = "fp32"
averaging_target_batch_size = 256
averager_rank = 8
architecture = { depth = 4 }
"""


def test_a_run_that_averages_gradients(tmp_path: Path) -> None:
    made = new_parameters(read(tmp_path, AVERAGING), PINS)
    assert (made.outer.strategy, made.outer.codec, made.outer.averaged_sequences, made.outer.rank) == (
        "averaging",
        "fp32",
        256,
        8,
    )
    assert run_parameters_from_json(run_parameters_to_json(made)) == made


@pytest.mark.parametrize(
    ("entry", "other", "words"),
    [
        ('aggregator = "mean"', 'aggregator = "median"', "aggregator must not be median with strategy averaging"),
        ('codec = "fp32"', 'codec = "topk"', "use averager_rank"),
        ('codec = "fp32"', 'codec = "int8"', "codec must not be int8 with averager_rank"),
        ('codec = "fp32"', 'codec = "powersgd"', "powersgd is not an encoding"),
        ('codec = "fp32"', 'codec = "fp32"\noverlap = true', "overlap must be false with strategy averaging"),
        ('codec = "fp32"', 'codec = "fp32"\ninner_optimizer = "muon"', "must be adamw with strategy averaging"),
        ('codec = "fp32"', 'codec = "fp32"\nadmission = "strangers"', "where strangers are admitted"),
        ("averager_rank = 8", 'averager_rank = 0\nadmission = "strangers"', "where strangers are admitted"),
        ("averager_rank = 8", "averager_rank = -1", r"Expected `int` >= 0 - at `\$\.outer\.rank`"),
        ("size = 256", "size = 0", r"Expected `int` >= 1 - at `\$\.outer\.averaged_sequences`"),
        (
            'strategy = "averaging"\naggregator = "mean"\ncodec = "fp32"',
            'strategy = "sparta"',
            "averaging_target_batch_size and averager_rank are for strategy averaging alone",
        ),
    ],
)
def test_gradients_are_averaged_in_few_ways(tmp_path: Path, entry: str, other: str, words: str) -> None:
    assert entry in AVERAGING
    with pytest.raises(UsageError, match=words):
        new_parameters(read(tmp_path, AVERAGING.replace(entry, other)), PINS)


def test_a_strategy_is_fixed_by_its_name_and_only_with_codecs_that_suit_it(tmp_path: Path) -> None:
    shape = "architecture = { depth = 4 }"
    for name in ("diloco", "sparta", "streaming"):
        made = new_parameters(read(tmp_path, f'strategy = "{name}"\n{shape}'), PINS)
        assert made.outer.strategy == name
        assert ("strategy" in cast("dict[str, object]", run_parameters_to_json(made)["outer"])) == (name != "diloco")
        assert run_parameters_from_json(run_parameters_to_json(made)) == made
    with pytest.raises(UsageError, match=r"strategy = 'gossip' cannot be used: Expected one of diloco, sparta"):
        new_parameters(read(tmp_path, f'strategy = "gossip"\n{shape}'), PINS)
    sparse = 'codec = "topk"\naggregator = "mean"'
    assert new_parameters(read(tmp_path, f'strategy = "streaming"\n{sparse}\n{shape}'), PINS).outer.codec == "topk"
    with pytest.raises(UsageError, match=r"strategy = 'sparta'.*codec must not be topk with strategy sparta"):
        new_parameters(read(tmp_path, f'strategy = "sparta"\n{sparse}\n{shape}'), PINS)


@pytest.mark.parametrize("entries", ['codec = "topk"\naggregator = "mean"', 'aggregator = "mean"\ncodec = "topk"'])
def test_codec_and_aggregator_are_looked_at_together(tmp_path: Path, entries: str) -> None:
    shape = "architecture = { depth = 4 }"
    made = new_parameters(read(tmp_path, f"{entries}\n{shape}"), PINS)
    assert (made.outer.codec, made.outer.aggregator) == ("topk", "mean")
    back = apply_config(made, read(tmp_path, 'aggregator = "median"\ncodec = "int8"'))
    assert (back.outer.codec, back.outer.aggregator) == ("int8", "median")
    assert new_parameters(read(tmp_path, f'codec = "topk"\n{shape}'), PINS).outer.aggregator == "mean"
    for wrong in ('codec = "topk"\naggregator = "trimmed_mean"', 'codec = "topk"\naggregator = "krum"'):
        with pytest.raises(UsageError, match=r"codec = 'topk'.*sparse contributions.*use aggregator = mean"):
            new_parameters(read(tmp_path, f"{wrong}\n{shape}"), PINS)


def test_what_is_left_out_is_as_in_a_run_of_ones_own(tmp_path: Path) -> None:
    parameters = new_parameters(read(tmp_path, "architecture = { depth = 4 }"), PINS)
    assert parameters.architecture == architecture_for(4, 512, 512)
    assert parameters.inner.learning_rate == scaled_learning_rate(parameters.architecture.hidden_size)
    muon = new_parameters(read(tmp_path, 'inner_optimizer = "muon"\narchitecture = { depth = 4 }'), PINS)
    assert muon.inner == replace(parameters.inner, optimizer="muon", learning_rate=2 * parameters.inner.learning_rate)
    assert (parameters.batch_size, parameters.sequences_per_step, parameters.outer.inner_steps) == (4, 4, 100)
    assert (parameters.admission, parameters.outer.trim_fraction) == ("friends", 0.1)
    assert run_parameters_from_json(run_parameters_to_json(parameters)) == parameters


def test_a_run_in_stages_takes_several_microbatches_a_step(tmp_path: Path) -> None:
    text = "num_stages = 3\narchitecture = { depth = 4 }\n"
    parameters = new_parameters(read(tmp_path, text), PINS)
    assert (parameters.stage_count, parameters.batch_size, parameters.sequences_per_step) == (3, 4, 32)
    parameters = new_parameters(read(tmp_path, f"batch_size = 2\n{text}"), PINS)
    assert (parameters.batch_size, parameters.sequences_per_step) == (2, 16)
    assert new_parameters(read(tmp_path, f"sequences_per_step = 4\n{text}"), PINS).sequences_per_step == 4


def test_activations_travel_as_int8_unless_the_owner_says_otherwise(tmp_path: Path) -> None:
    text = "num_stages = 3\narchitecture = { depth = 4 }\n"
    made = new_parameters(read(tmp_path, text), PINS)
    assert (made.wire_precision, made.wire_precision_gradients) == ("int8", "")
    assert new_parameters(read(tmp_path, f'wire_precision = "fp32"\n{text}'), PINS).wire_precision == "fp32"


def test_strangers_are_trimmed_unless_the_owner_says_otherwise(tmp_path: Path) -> None:
    text = 'admission = "strangers"\narchitecture = { depth = 2 }\n'
    made = new_parameters(read(tmp_path, text), PINS).outer
    assert (made.aggregator, made.trim_fraction) == ("trimmed_mean", 0.25)
    assert new_parameters(read(tmp_path, f'aggregator = "median"\n{text}'), PINS).outer.aggregator == "median"
    assert new_parameters(read(tmp_path, f"trim_fraction = 0.4\n{text}"), PINS).outer.trim_fraction == 0.4


def test_sizes_beside_a_depth_replace_those_of_the_family(tmp_path: Path) -> None:
    config = read(tmp_path, "batch_size = 8\n[architecture]\ndepth = 3\nsequence_length = 64\nfeed_forward_size = 100")
    parameters = new_parameters(config, PINS)
    expected = replace(architecture_for(3, 512, 64), feed_forward_size=100)
    assert (parameters.architecture, parameters.sequences_per_step) == (expected, 8)


def test_a_run_may_know_fewer_ids_than_its_data(tmp_path: Path) -> None:
    config = read(tmp_path, "[architecture]\ndepth = 4\nvocabulary_size = 300")
    parameters = new_parameters(config, PINS)
    assert parameters.architecture.vocabulary_size == 300
    assert parameters.genesis == replace(PINS, next_merge_id=300)


def test_yaml_says_the_same(tmp_path: Path) -> None:
    text = f"""
# the same as TOML
inner_lr: 1e-3
outer_lr: 0.5
admission: friends
seeds:
  - {SEED}
architecture:
  depth: 4
"""
    same = f'inner_lr = 1e-3\nouter_lr = 0.5\nadmission = "friends"\nseeds = ["{SEED}"]\narchitecture = {{ depth = 4 }}'
    assert read(tmp_path, text, "run.yaml") == read(tmp_path, text, "run.yml") == read(tmp_path, same)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inner_lrr = 1", ["run.toml: inner_lrr", "Did you mean inner_lr?"]),
        ("stages = 2", ["stages", "Did you mean num_stages?"]),
        ("qqqq = 2", ["qqqq", "Known are", "architecture"]),
        ("[architecture]\nlayers = 2", ["architecture.layers", "Did you mean n_layers?"]),
        ("[genesis]\nroots = 2", ["genesis.roots", "Did you mean root?"]),
        ("inner_lr = = 1", ["not", "line 1"]),
    ],
)
def test_unknown_names_get_the_nearest_known_one(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("inner_lr: [1", "line 1"),
        ("inner_lr: 1\ninner_lr: 2", "inner_lr occurs twice"),
        ("architecture: {depth: 2, depth: 3}", "depth occurs twice"),
        ("- inner_lr", "names and values are needed"),
        ("", "names and values are needed"),
        ("1: 2", "names and values are needed"),
        ("inner_lr: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("[" * 5000, "cannot be used"),
        ("inner_lr: 2020-99-99", "cannot be used"),
        ("\x00", "cannot be used"),
    ],
)
def test_yaml_that_is_no_run_is_a_usage_error(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read(tmp_path, text, "run.yaml")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither a \.toml nor a \.yaml"):
        read(tmp_path, "{}", "run.json")
    with pytest.raises(UsageError, match="larger"):
        read(tmp_path, "#" * 1_000_001)
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be used"):
        read_run_config(tmp_path / "run.toml")
    with pytest.raises(StorageError, match="cannot be read"):
        read_run_config(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("inner_lr = 'x'", "inner_lr = 'x' cannot be used: Expected `float`"),
        ("inner_lr = nan", "inner_lr = nan cannot be used"),
        ("inner_lr = 2020-01-01", "inner_lr cannot be used: Expected `float`"),
        ("inner_steps = 0", "inner_steps = 0 cannot be used: Expected `int` >= 1"),
        ("batch_size = 'x'", "batch_size = 'x' cannot be used"),
        ("num_stages = 3", "num_stages = 3 cannot be used: stage_count must not exceed layer_count"),
        ("schedule = 'step'", "schedule = 'step' cannot be used: Expected one of cosine"),
        ("codec = 'int9'", "codec = 'int9' cannot be used: Expected one of fp32, bf16, int8"),
        ("admission = true", "admission = True cannot be used"),
        ("admission = 'admitted'", "admission = admitted needs at least one key"),
        (f"authority = ['{KEY}']", "and other runs have none"),
        (f"admission = 'admitted'\nauthority = ['{KEY}', '{KEY}']", "names a key twice"),
        ("admission = 'admitted'\nauthority = ['ab']", "authority"),
        ("wire_precision = 'int2'", "wire_precision = 'int2' cannot be used: Expected one of fp32"),
        ("wire_precision_gradients = 'same'", "wire_precision_gradients = 'same' cannot be used: Expected one of "),
        ("data_plane = 'ring'", "data_plane = 'ring' cannot be used: Expected one of chain, star"),
        ("routing = 'fastest'", "routing = 'fastest' cannot be used: Expected one of lanes, balanced"),
        ("admission = 'strangers'\nrouting = 'balanced'", "routing must be lanes where strangers are admitted"),
        ("outer_momentum = 1", "outer_momentum = 1 cannot be used"),
        ("seeds = ['192.0.2.1']", "seeds cannot be used: '192.0.2.1' does not start with"),
        ("name = 1", "name = 1 cannot be used"),
        ("holds_from_outer_step = 3", "for a later version"),
    ],
)
def test_a_wrong_value_is_told_by_the_name_in_the_file(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        new_parameters(read(tmp_path, f"{text}\narchitecture = {{ depth = 2 }}"), PINS)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "problem"),
    [
        ("", "names no architecture"),
        ("architecture = 4", "must be a table"),
        ("architecture = {}", "missing required field `feed_forward_size`"),
        ("architecture = { depth = 1 }", "depth must be in 2..128"),
        ("architecture = { depth = true }", "depth must be a whole number"),
        ("architecture = { depth = 2, hidden_size = 'wide' }", "Expected `int`, got `str` - at `$.hidden_size`"),
        ("architecture = { depth = 2, hidden_size = 0 }", "Expected `int` >= 1 - at `$.hidden_size`"),
        ("architecture = { depth = 2, vocabulary_size = 100 }", "next_merge_id must not exceed vocabulary_size"),
    ],
)
def test_a_wrong_architecture_is_told(tmp_path: Path, architecture: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        new_parameters(read(tmp_path, architecture), PINS)
    assert problem in str(caught.value)


def test_entries_replace_those_of_a_run_and_nothing_else(tmp_path: Path) -> None:
    base = new_parameters(read(tmp_path, EVERYTHING), PINS)
    assert apply_config(base, {}) == base
    assert apply_config(base, {"outer_lr": 0.25}) == replace(base, outer=replace(base.outer, learning_rate=0.25))
    assert apply_config(base, read(tmp_path, EVERYTHING)) == base


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ("", ()),
        ("inner_steps = 500", ()),  # by the law, such a run has long intervals only when it can
        ('interval = "fixed"\ninner_steps = 25', ()),
        ('interval = "fixed"\ninner_steps = 500\nouter_momentum = 0.9', ("1.819", "0.06 to 0.15")),
        ("outer_lr = 1.2", ("outer_lr = 1.2",)),
        ('strategy = "sparta"\nouter_momentum = 0.9', ()),  # it uses neither
    ],
)
def test_a_recipe_known_to_lose_is_named_with_its_figure(tmp_path: Path, entries: str, named: tuple[str, ...]) -> None:
    outer = new_parameters(read(tmp_path, f"{entries}\narchitecture = {{ depth = 4 }}"), PINS).outer
    warnings = recipe_warnings(outer)
    assert len(warnings) == len(named)
    assert all(figure in warning for figure, warning in zip(named, warnings, strict=True))
