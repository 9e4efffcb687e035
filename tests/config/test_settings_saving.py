"""What a stored setting looks like on disk, and that it is read back as it was reported."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.config.loading import load_settings
from neuroshard.config.saving import edit_toml, save_settings, toml_value
from neuroshard.errors import StorageError, UsageError

FIRST = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
SECOND = FIRST.replace("192.0.2.1", "192.0.2.2")


def test_saved_values_are_reported_as_the_next_start_reads_them(tmp_path: Path) -> None:
    saved = save_settings(tmp_path, {"memory": "4000", "max_storage": 500, "genesis": 'a "b" \\ c', "training": "no"})
    settings = load_settings({}, {}, tmp_path).settings
    assert (settings.memory, settings.max_storage, settings.genesis, settings.training) == (
        4000,
        500,
        'a "b" \\ c',
        False,
    )
    assert saved.values == {"memory": 4000, "max_storage": 500, "genesis": 'a "b" \\ c', "training": False}
    assert saved.at_once == ("max_storage",)
    assert set(saved.after_restart) == {"memory", "genesis", "training"}


def test_lists_are_stored_and_read_back(tmp_path: Path) -> None:
    """From a command a list comes as one, from a text box with commas."""
    for written in ([FIRST, SECOND], f"{FIRST}, {SECOND}"):
        saved = save_settings(tmp_path, {"peer": written})
        assert saved.values == {"peer": [FIRST, SECOND]}
        assert (tmp_path / "config.toml").read_text() == f'peer = ["{FIRST}", "{SECOND}"]\n'
        assert load_settings({}, {}, tmp_path).settings.peer == (FIRST, SECOND)
        save_settings(tmp_path, {"peer": None})
        assert load_settings({}, {}, tmp_path).settings.peer == ()


def test_a_list_over_several_lines_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'port = 9000\npeer = [\n  "{FIRST}",\n  "{SECOND}",\n]\n')
    save_settings(tmp_path, {"port": 9001})
    assert load_settings({}, {}, tmp_path).settings.peer == (FIRST, SECOND)
    save_settings(tmp_path, {"peer": [SECOND]})
    settings = load_settings({}, {}, tmp_path).settings
    assert (settings.port, settings.peer) == (9001, (SECOND,))


def test_other_keys_and_comments_survive_and_none_goes_back_to_the_default(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('# my computer\nport = 9000 # not 8000\n\n"memory" = 3000\ndiloco_steps = 5\n')
    save_settings(tmp_path, {"memory": None, "inner_steps": 6, "verbose": True})
    assert path.read_text() == "# my computer\nport = 9000 # not 8000\n\ninner_steps = 6\nverbose = true\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.toml"]


def test_text_over_several_lines_is_not_mistaken_for_a_key(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('genesis = """\nport = 1\n"""\n')
    before = load_settings({}, {}, tmp_path).settings.genesis
    save_settings(tmp_path, {"port": 2})
    settings = load_settings({}, {}, tmp_path).settings
    assert (settings.port, settings.genesis) == (2, before)


@pytest.mark.parametrize(
    "changes",
    [
        {"prot": 1},
        {"port": -1},
        {"token": "x"},
        {"data_dir": "/x"},
        {"memory": {}},
        {"memory": 5, "port": "x"},
        {"peer": "x"},
        {"peer": [FIRST, 3]},
        {"peer": {}},
        {"run": "12"},
    ],
)
def test_a_wrong_change_changes_nothing(tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("port = 9000\n")
    with pytest.raises(UsageError):
        save_settings(tmp_path, changes)
    assert path.read_text() == "port = 9000\n"


def test_a_change_that_a_flag_or_the_environment_overrides_is_named(tmp_path: Path) -> None:
    sources = load_settings({"port": 1}, {"NEUROSHARD_MEMORY": "5"}, tmp_path).sources
    saved = save_settings(tmp_path, {"port": 2, "memory": 6, "device": "cpu"}, sources)
    assert saved.overridden == {"port": "flag", "memory": "environment"}


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="unchanged"):
        save_settings(tmp_path / "missing", {"port": 1})


Scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
Values = st.one_of(Scalars, st.lists(Scalars, max_size=3))


@given(values=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), Values, max_size=5))
def test_values_survive_toml(values: dict[str, object]) -> None:
    text = "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())
    assert tomllib.loads(text) == values


@given(old=st.dictionaries(st.sampled_from(["a", "b", "c"]), Values), new=Values)
def test_an_edit_changes_one_key_only(old: dict[str, object], new: object) -> None:
    text = "".join(f"{key} = {toml_value(value)}\n" for key, value in old.items())
    assert tomllib.loads(edit_toml(text, {"b": new}, old | {"b": new})) == old | {"b": new}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", [[1]], [None], {}, None])
def test_what_toml_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        toml_value(value)
