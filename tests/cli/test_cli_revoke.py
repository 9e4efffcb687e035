"""`neuroshard wallet revoke`: a person whose laptop was stolen names it as `neuroshard machines` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.node_process import TOKEN
from neuroshard.config.folders import NodePaths
from neuroshard.errors import ConflictError, StorageError, UsageError
from neuroshard.host.identity import MOST_SIGNED, StoredRevocations, node_identity
from neuroshard.identity import NodeKey, Wallet, parse_token
from neuroshard.node.own_machines import StoredMachine, StoredMachines, machines_file
from neuroshard.status.machines import machine_status
from neuroshard.types import NodeId
from tests.worlds.commands import Command
from tests.worlds.statuses import training_status

WALLET = Wallet.from_secret(parse_token(TOKEN))
STOLEN, OTHER = (NodeKey.from_seed(bytes([number] * 32)).node_id for number in (1, 2))


def revoked_in(folder: Path) -> tuple[NodeId, ...]:
    return StoredRevocations(folder).revoked().nodes_of(WALLET.wallet_id)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data folder of a stopped node that has listed two machines of its wallet."""
    report = machine_status(training_status(), "laptop")
    machines = tuple(StoredMachine(node, 1.8e9, report) for node in (STOLEN, OTHER))
    machines_file(tmp_path).write(StoredMachines(1, NodeId(""), machines))
    return tmp_path


def test_a_machine_is_named_by_the_end_of_its_id(neuroshard: Command, folder: Path) -> None:
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    done = owner("wallet", "revoke", STOLEN[-8:], "--data-dir", folder)
    assert done.code == 0
    assert f"Node {STOLEN} may not act for wallet {WALLET.wallet_id[:8]} any more." in done.out
    assert "when your node runs" in done.out
    assert "a thief with the token acts as your wallet" in done.out
    assert revoked_in(folder) == (STOLEN,)
    file = NodePaths.below(folder).revoked_nodes
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    shown = f"{STOLEN[:8]}…{STOLEN[-6:]}"  # by the dashboard
    again = owner("wallet", "revoke", shown, "--data-dir", folder, "--json").json()
    assert again == {"node_id": STOLEN, "wallet_id": WALLET.wallet_id, "is_new": False}


def test_a_name_that_fits_no_node_changes_nothing(neuroshard: Command, folder: Path) -> None:
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    for name in ("12345678", STOLEN[-5:], "x" * 500, STOLEN[:-1]):
        refused = owner("wallet", "revoke", name, "--data-dir", folder)
        assert refused.code == 2
        assert "`neuroshard machines` lists them" in refused.err
    assert revoked_in(folder) == ()


def test_the_own_node_is_not_revoked_by_accident(neuroshard: Command, folder: Path) -> None:
    own = NodeKey.load_or_create(NodePaths.below(folder).node_key).node_id
    refused = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)("wallet", "revoke", own, "--data-dir", folder)
    assert (refused.code, revoked_in(folder)) == (2, ())
    assert "This is the node of this computer." in refused.err


def test_a_token_is_needed(neuroshard: Command, folder: Path) -> None:
    assert neuroshard("wallet", "revoke", STOLEN, "--data-dir", folder).code != 0
    assert revoked_in(folder) == ()


def test_a_revoked_key_does_not_start_again_and_a_new_one_does(tmp_path: Path) -> None:
    """Also from a backup that was made before."""
    key = NodePaths.below(tmp_path).node_key
    old = node_identity(WALLET, tmp_path).node_id
    assert StoredRevocations(tmp_path).revoke(WALLET, old)
    with pytest.raises(ConflictError, match="has revoked this computer's node"):
        node_identity(WALLET, tmp_path)
    key.rename(key.with_name("old"))
    assert node_identity(WALLET, tmp_path).node_id != old


def test_a_damaged_file_stops_the_start_and_says_what_to_do(tmp_path: Path) -> None:
    """Otherwise the stolen node would be let in again."""
    stored, file = StoredRevocations(tmp_path), NodePaths.below(tmp_path).revoked_nodes
    stored.revoke(WALLET, STOLEN)
    whole = file.read_bytes()
    for content in (b"{", whole[:-8], whole.replace(b"A", b"B"), b'{"signed":["' + b"A" * 100_000 + b'"]}'):
        file.write_bytes(content)
        with pytest.raises(StorageError) as refused:
            node_identity(WALLET, tmp_path)
        assert "delete it and revoke them again" in refused.value.action
        assert file.read_bytes() == content
    file.write_bytes(whole)
    node_identity(WALLET, tmp_path)


def test_a_wallet_revokes_a_limited_number_of_nodes(tmp_path: Path) -> None:
    stored = StoredRevocations(tmp_path)
    for number in range(MOST_SIGNED):
        assert stored.revoke(WALLET, NodeKey.from_seed(bytes([number + 1] * 32)).node_id)
    with pytest.raises(UsageError, match="the most that it can"):
        stored.revoke(WALLET, NodeKey.from_seed(bytes([99] * 32)).node_id)
    assert len(revoked_in(tmp_path)) == MOST_SIGNED
