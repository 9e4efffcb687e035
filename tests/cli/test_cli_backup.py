"""An identity on its way from one computer to another."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from benchmarks.node_process import TOKEN
from neuroshard.identity import NodeKey
from tests.worlds.commands import Command

pytestmark = pytest.mark.process


@pytest.fixture
def passphrase(tmp_path: Path) -> Path:
    file = tmp_path / "passphrase"
    file.write_text("correct horse battery\n")
    return file


def test_an_identity_moves_to_a_folder_that_has_none(neuroshard: Command, passphrase: Path, tmp_path: Path) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "backup"
    node_id = NodeKey.load_or_create(old / "keys" / "node-key").node_id
    secret = ("--passphrase-file", passphrase)
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    told = owner("wallet", "backup", file, *secret, "--data-dir", old, "--json").json()
    assert told == {"wallet_id": told["wallet_id"], "has_node_key": True}
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = owner("wallet", "backup", file, *secret, "--data-dir", old)
    assert (again.code, "never overwritten" in again.err) == (5, True)

    restored = neuroshard("wallet", "restore", file, *secret, "--data-dir", new)
    assert restored.code == 0, restored.err
    shown = neuroshard("wallet", "show", "--data-dir", new, "--json").json()
    assert (shown["wallet_id"], shown["node_id"]) == (told["wallet_id"], node_id)
    assert neuroshard("wallet", "restore", file, *secret, "--data-dir", new).code == 0  # the same: nothing to refuse
    if sys.platform != "win32":
        private = [new / "keys" / name for name in ("wallet", "node-key")]
        assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o600, 0o600]


def test_another_identity_is_never_overwritten(neuroshard: Command, passphrase: Path, tmp_path: Path) -> None:
    file, secret = tmp_path / "backup", ("--passphrase-file", passphrase)
    NodeKey.load_or_create(tmp_path / "old" / "keys" / "node-key")
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    assert owner("wallet", "backup", file, *secret, "--data-dir", tmp_path / "old").code == 0
    other_key, other_wallet = tmp_path / "key", tmp_path / "wallet"
    kept = NodeKey.load_or_create(other_key / "keys" / "node-key").node_id
    refused = neuroshard("wallet", "restore", file, *secret, "--data-dir", other_key)
    assert (refused.code, "is the key of another node" in refused.err) == (5, True)
    assert NodeKey.load_or_create(other_key / "keys" / "node-key").node_id == kept
    assert not (other_key / "keys" / "wallet").exists()
    other_wallet.mkdir()
    (other_wallet / "token").write_text("another token of somebody else\n")
    (other_wallet / "config.toml").write_text(f'token_file = "{other_wallet / "token"}"\n')
    refused = neuroshard("wallet", "restore", file, *secret, "--data-dir", other_wallet)
    assert (refused.code, "belongs to another wallet" in refused.err) == (5, True)


def test_what_cannot_be_opened_is_told(neuroshard: Command, passphrase: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "backup", tmp_path / "new"
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    assert owner("wallet", "backup", file, "--passphrase-file", passphrase, "--data-dir", tmp_path / "old").code == 0
    passphrase.write_text("wrong horse battery")
    wrong = neuroshard("wallet", "restore", file, "--passphrase-file", passphrase, "--data-dir", new)
    assert (wrong.code, "The passphrase does not match this backup." in wrong.err) == (3, True)
    file.write_bytes(file.read_bytes()[:-20])
    cut = neuroshard("wallet", "restore", file, "--passphrase-file", passphrase, "--data-dir", new)
    assert (cut.code, "The backup is damaged" in cut.err) == (5, True)
    assert neuroshard("wallet", "restore", file, "--passphrase-file", tmp_path / "none").code == 3
    unasked = neuroshard("wallet", "restore", file, "--data-dir", new)  # no terminal
    assert (unasked.code, "--passphrase-file" in unasked.err, "Warning" in unasked.err) == (3, True, False)
    assert not (new / "keys").exists()


def test_nobody_is_asked_for_a_passphrase_in_vain(neuroshard: Command, tmp_path: Path) -> None:
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    (tmp_path / "there").write_text("something")
    taken = owner("wallet", "backup", tmp_path / "there", "--data-dir", tmp_path / "old")  # no terminal to ask at
    assert (taken.code, "never overwritten" in taken.err) == (5, True)
    missing = neuroshard("wallet", "restore", tmp_path / "none", "--data-dir", tmp_path / "new")
    assert (missing.code, "cannot be read" in missing.err) == (5, True)
