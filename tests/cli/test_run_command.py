"""`neuroshard run` as its user types it: make a run, show it, sign a later version, and what mistakes lead to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.node_process import TOKEN
from neuroshard.identity import Wallet, parse_token
from neuroshard.runs.stored_runs import JoinedRuns, read_offer_file
from tests.worlds.commands import Command

pytestmark = pytest.mark.process
WALLET = Wallet.from_secret(parse_token(TOKEN))
CONFIG = 'name = "friends"\ninner_lr = 1e-3\narchitecture = { depth = 2, sequence_length = 64 }\n'
SEED = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


@pytest.fixture
def owner(neuroshard: Command) -> Command:
    """The command with the owner's token."""
    return neuroshard.having(NEUROSHARD_TOKEN=TOKEN)


def test_a_run_is_made_shown_and_changed(
    owner: Command, neuroshard: Command, small_genesis: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    file = tmp_path / "run.json"
    create = ("run", "create", "--config", tmp_path / "run.toml", "--genesis", small_genesis, "--out", file)
    made = owner(*create)
    assert made.code == 0, made.err
    run_id = read_offer_file(file).run_id
    assert f"Signed: run {run_id}, version 1, of wallet {WALLET.wallet_id}." in made.out
    assert "neuroshard --invite LINK\n" in made.out
    assert "`neuroshard run invite` makes one" in made.out
    assert "Other computers get the data from your node." in made.out
    assert TOKEN not in made.out + file.read_text()

    again = owner(*create, "--json").json()
    assert (again["run_id"], again["version"], again["is_new"]) == (run_id, 1, False)
    assert again["serve"] == f"neuroshard --run {run_id} --genesis {small_genesis}"

    (tmp_path / "later.yaml").write_text(f"inner_lr: 1e-4\nseeds: [{SEED}]\nholds_from_outer_step: 12\n")
    changed = owner("run", "create", "--config", tmp_path / "later.yaml", "--update", file)
    assert changed.code == 0, changed.err
    assert f"Signed: run {run_id}, version 2" in changed.out
    assert "--invite LINK" in changed.out
    assert "It applies from outer step 12, or from the second one after its entry in the chain" in changed.out
    assert "Until then version 1 applies." in changed.out

    by_file = neuroshard("run", "show", file)  # needs no token
    assert f"run id     {run_id}" in by_file.out
    assert "version    2, from outer step 12\nbefore     1, from outer step 0\n" in by_file.out
    assert any(
        line.split() == ["inner.learning_rate", "0.0001", "(first:", "0.001)"] for line in by_file.out.splitlines()
    )
    by_id = neuroshard("run", "show", run_id, "--json").json()
    assert (by_id["version"], by_id["verified"], by_id["owner_wallet_id"]) == (2, True, WALLET.wallet_id)
    assert set(by_id["changed"]) == {"version", "inner.learning_rate", "holds_from_outer_step", "seeds"}
    assert by_id["versions"] == [{"version": 1, "from_outer_step": 0}, {"version": 2, "from_outer_step": 12}]
    assert by_id["parameters"]["inner"]["learning_rate"] == 1e-4
    assert by_id["initial"]["inner"]["learning_rate"] == 1e-3


def test_a_run_and_its_data_are_made_of_texts_by_one_command(
    owner: Command, small_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    create = ("run", "create", "--config", "run.toml", "--text", small_text, "--json")
    made = owner(*create)
    assert made.code == 0, made.err
    assert "Built: " in made.err
    assert made.json()["serve"] == f"neuroshard --run {made.json()['run_id']} --genesis genesis"
    assert read_offer_file(Path(made.json()["file"])).parameters.genesis.tokenizer_sha256
    again = owner(*create)
    assert "Already there: " in again.err
    assert again.json()["run_id"] == made.json()["run_id"]
    for others, words in (
        (("--genesis", "https://data.example"), "--text cannot write to https://data.example."),
        (("--update", made.json()["file"]), "--text and --update exclude each other."),
    ):
        refused = owner(*create, *others)
        assert refused.code == 2
        assert words in refused.err


def test_the_owner_of_an_open_run_names_the_wallets_that_may_vote(
    owner: Command, neuroshard: Command, small_genesis: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(f'admission = "strangers"\n{CONFIG}')
    given = ("--config", tmp_path / "run.toml", "--genesis", small_genesis, "--out", tmp_path / "run.json")
    made = owner("run", "create", *given)
    assert made.code == 0, made.err
    names = [digit * 32 for digit in "ab"]
    short = owner("run", "trust", names[0][:8])
    assert (short.code, "Give all 32 digits" in short.err) == (2, True)
    for name in names:
        named = owner("run", "trust", name.upper())
        assert named.code == 0, named.err
    assert "Wallets that may vote on run friends, in addition to yours: aaaaaaaa, bbbbbbbb." in named.out
    foreign = neuroshard.having(NEUROSHARD_TOKEN="ab" * 32)("run", "trust", "c" * 32)
    assert (foreign.code, "Only the run's owner" in foreign.err) == (2, True)
    members = owner("run", "members", "--json").json()["members"]
    assert [(row["wallet_id"], row["label"]) for row in members] == [
        (WALLET.wallet_id, "owner"),
        *((name, "named") for name in names),
    ]
    assert owner("run", "remove", "aaaa").code == 2
    removed = owner("run", "remove", names[0][:8])
    assert f"Wallet {names[0]} is no longer named." in removed.out, removed.err
    assert owner("run", "trust", names[0], "--withdraw").code == 2
    lines = owner("run", "members").out.splitlines()
    assert [line.split()[1] for line in lines] == [WALLET.wallet_id, names[1]]  # whole, as `run trust` needs them


def test_a_run_is_cut_into_stages(owner: Command, small_genesis: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    file = tmp_path / "run.json"
    create = ("run", "create", "--config", tmp_path / "run.toml", "--genesis", small_genesis, "--out", file)
    assert owner(*create, "--num-stages", "2").code == 0
    assert read_offer_file(file).parameters.stage_count == 2
    refused = owner(*create, "--num-stages", "3")
    assert refused.code == 2
    assert "num_stages = 3 cannot be used" in refused.err


def test_an_organised_run_is_planned_without_a_key_and_names_its_three_commands(
    owner: Command, small_genesis: Path, tmp_path: Path
) -> None:
    config, file = tmp_path / "run.toml", tmp_path / "run.json"
    config.write_text(CONFIG + 'admission = "admitted"\n')
    assert owner("run", "plan", config).code == 0
    made = owner("run", "create", "--config", config, "--genesis", small_genesis, "--out", file)
    assert made.code == 0, made.err
    run_id = read_offer_file(file).run_id
    assert [line.split(":  ")[-1].strip() for line in made.out.splitlines() if "neuroshard" in line] == [
        f"neuroshard --run {run_id} --genesis {small_genesis}",
        f"neuroshard organise --run {run_id}",
        f"neuroshard --run {run_id} --organiser URL",
    ]


def test_a_plan_shows_memory_and_bytes_per_stage_without_token_and_data(neuroshard: Command, tmp_path: Path) -> None:
    entries = "batch_size = 1\nwire_precision = 'int8'"
    shape = "architecture = { config = 'reparam_13B_C', use_compression = false }"
    (tmp_path / "run.toml").write_text(f"{entries}\n{shape}")
    plan = neuroshard("run", "plan", tmp_path / "run.toml", "--memory", "120000")
    assert plan.code == 0, plan.err
    rows = [line.split() for line in plan.out.splitlines() if line[:5].strip().isdecimal()]
    assert [row[:3] for row in rows[:2]] == [["1", "0-3", "2,040,791,040"], ["2", "4-7", "1,384,120,320"]]
    assert [row[-2:] for row in rows] == [["5,440", "-"], *[["5,440", "5,440"]] * 11, ["-", "5,440"]]
    assert "formats hf and gguf cannot" in plan.out
    facts = neuroshard("run", "plan", tmp_path / "run.toml", "--json").json()
    assert (facts["parameters"], len(facts["stages"]), facts["wire_precision"]) == (18_614_850_560, 13, "int8")
    assert facts["stages"][12]["first_layer"] == 48
    assert any("can train" in warning for warning in facts["warnings"])
    (tmp_path / "run.toml").write_text(f"{entries}\narchitecture = {{ config = 'reparam_13B_C' }}")
    compressed = neuroshard("run", "plan", tmp_path / "run.toml", "--memory", "120000")
    rows = [line.split() for line in compressed.out.splitlines() if line[:5].strip().isdecimal()]
    assert [row[-2:] for row in rows] == [["59", "-"], *[["59", "55"]] * 11, ["-", "55"]]  # 51 + a scale + an id
    assert "Subspace of rank 51: coefficients and token ids travel; the last 2 layers are free" in compressed.out
    assert "uploads 114 bytes per token. The limit of its line is 5,482 tokens/s at 5 Mbit/s, 21,929" in compressed.out
    assert "subspace_rank = 51 sends 59 bytes per token in int8 instead of 5,440" in compressed.out
    facts = neuroshard("run", "plan", tmp_path / "run.toml", "--json").json()
    assert (facts["subspace_rank"], round(facts["parameters"] / 1e9, 3)) == (51, 12.234)
    (tmp_path / "run.toml").write_text("architecture = { config = 'reparam_13B' }")
    wrong = neuroshard("run", "plan", tmp_path / "run.toml")
    assert (wrong.code, "Near names: reparam_13B_C" in wrong.err) == (2, True)
    assert not list(tmp_path.rglob("*.json"))  # nothing is signed


def test_a_model_that_other_programs_cannot_read_is_reported_before_anything_is_signed(
    owner: Command, tmp_path: Path
) -> None:
    options = 'norm_reorder = true, qk_norm = "head"'
    (tmp_path / "run.toml").write_text(f"architecture = {{ depth = 2, {options} }}")
    missing = owner("run", "create", "--config", tmp_path / "run.toml", "--genesis", tmp_path / "nowhere")
    assert missing.code != 0  # the data cannot be opened, so nothing is signed
    assert f"({options}), so the formats hf and gguf cannot" in missing.err
    (tmp_path / "run.toml").write_text("architecture = { depth = 2, norm_reorder = true, qk_norm = 'width' }")
    missing = owner("run", "create", "--config", tmp_path / "run.toml", "--genesis", tmp_path / "nowhere")
    assert "formats" not in missing.err


def test_a_file_is_not_written_over(owner: Command, small_genesis: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "mine.json").write_text("{}")
    create = ("run", "create", "--config", tmp_path / "run.toml", "--genesis", small_genesis)
    refused = owner(*create, "--out", tmp_path / "mine.json")
    assert refused.code == 2
    assert "--out" in refused.err
    assert (tmp_path / "mine.json").read_text() == "{}"
    assert not list(owner.home.rglob("joined"))  # nothing was signed
    (tmp_path / "other.toml").write_text(CONFIG.replace("friends", "others"))
    other = ("run", "create", "--config", tmp_path / "other.toml", "--genesis", small_genesis)
    assert owner(*other, "--out", tmp_path / "other.json").code == 0
    kept = (tmp_path / "other.json").read_text()
    refused = owner(*create, "--out", tmp_path / "other.json")
    assert refused.code == 2
    assert "holds the run" in refused.err
    assert (tmp_path / "other.json").read_text() == kept


def test_mistakes_in_the_file_are_2_and_told_before_any_data_come(owner: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("inner_lrr = 3\n")
    outcome = owner("run", "create", "--config", tmp_path / "run.toml", "--genesis", tmp_path / "nowhere")
    assert outcome.code == 2
    assert "Did you mean inner_lr?" in outcome.err


def test_no_token_is_3_and_no_data_is_6(neuroshard: Command, owner: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    arguments = ("run", "create", "--config", tmp_path / "run.toml", "--genesis", tmp_path / "nowhere")
    out = ("--out", tmp_path / "run.json")
    assert neuroshard(*arguments, *out).code == 3
    missing = owner(*arguments, *out)
    assert missing.code == 6
    assert str(tmp_path / "nowhere") in missing.err
    assert not (tmp_path / "run.json").exists()


def test_what_cannot_be_shown_is_told(neuroshard: Command, tmp_path: Path) -> None:
    short = neuroshard("run", "show", "0123456789abcdef")
    assert short.code == 2
    assert "64 hex digits, 0123456789abcdef has 16" in short.err
    unknown = neuroshard("run", "show", "0" * 64)
    assert unknown.code == 2
    assert "not known" in unknown.err
    (tmp_path / "run.json").write_text('{"run_id": 1}')
    wrong = neuroshard("run", "show", tmp_path / "run.json")
    assert wrong.code == 6
    assert str(tmp_path / "run.json") in wrong.err
    assert "Traceback" not in wrong.err


def test_a_run_becomes_the_default_of_its_data(
    owner: Command, neuroshard: Command, small_genesis: Path, small_text: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    genesis = shutil.copytree(small_genesis, tmp_path / "genesis")
    file = tmp_path / "signed.json"
    assert owner("run", "create", "--config", tmp_path / "run.toml", "--genesis", genesis, "--out", file).code == 0
    run_id = read_offer_file(file).run_id
    publish = ("run", "publish", file, "--genesis", genesis, "--seed", SEED)
    stranger = neuroshard.having(NEUROSHARD_TOKEN="ab" * 32)(*publish)
    assert stranger.code == 2
    assert f"signed by wallet {WALLET.wallet_id}, not by" in stranger.err
    assert not (genesis / "run.json").exists()
    published = owner(*publish)
    assert published.code == 0, published.err
    assert f"run {run_id} is now the default run" in published.out
    assert f"Seed: {SEED}" in published.out
    by_id = owner("run", "publish", run_id, "--genesis", genesis, "--json").json()
    assert (by_id["run_id"], by_id["seeds"], by_id["replaced"]) == (run_id, [], None)
    assert neuroshard("genesis", "verify", genesis).code == 0
    default = (genesis / "run.json").read_bytes()
    rebuilt = owner("genesis", "build", "--text", small_text, "--out", genesis, "--vocabulary", "300")
    assert rebuilt.code == 0, rebuilt.err
    assert "The default run published here is unchanged." in rebuilt.out
    assert (genesis / "run.json").read_bytes() == default


def test_the_owner_changes_one_value_after_a_question(
    owner: Command, neuroshard: Command, small_genesis: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    where = ("--data-dir", tmp_path / "node")
    create = ("run", "create", "--config", tmp_path / "run.toml", "--genesis", small_genesis, *where)
    run_id = owner(*create, "--out", tmp_path / "run.json", "--json").json()["run_id"]
    runs, change = JoinedRuns(tmp_path / "node"), ("organise", "set", "schedule", "linear", "--run", run_id, *where)
    asked = owner(*change)  # nobody answers
    assert asked.code != 0
    assert "schedule: cosine -> linear" in asked.out
    assert "It applies from outer step 0, or from the second one after its entry" in asked.out
    stored = runs.load(run_id)
    assert stored is not None
    assert stored.parameters.version == 1
    foreign = neuroshard.having(NEUROSHARD_TOKEN="ab" * 32)(*change, "--yes")
    assert (foreign.code, "Only its owner can sign a new version" in foreign.err) == (2, True)
    refused = owner("organise", "set", "num_stages", "2", "--run", run_id, *where, "--yes")
    assert (refused.code, "the plan says which layers each node holds" in refused.err) == (2, True)

    observer = tmp_path / "node" / "organiser" / run_id[:16] / "observer"  # of an organiser on this data folder
    observer.mkdir(parents=True)
    done = owner(*change, "--from", "7", "--yes", "--json").json()
    assert done == {
        "run_id": run_id,
        "version": 2,
        "changed": {"schedule": ["cosine", "linear"]},
        "holds_from_outer_step": 7,
    }
    for folder in (tmp_path / "node", observer):
        stored = JoinedRuns(folder).load(run_id)
        assert stored is not None
        assert (stored.parameters.version, stored.parameters.inner.schedule) == (2, "linear")
