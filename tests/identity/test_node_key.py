from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import StorageError
from neuroshard.identity import NodeKey, node_id_of, public_key_of, verify_signature

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text("utf-8"))
POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_start_makes_a_key_and_the_next_ones_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "node-key"
    key = NodeKey.load_or_create(path)
    again = NodeKey.load_or_create(path)
    assert again.node_id == key.node_id
    verify_signature(key.public_key, b"message", again.sign(b"message"))
    assert [item.name for item in path.parent.iterdir()] == ["node-key"]
    assert "private" not in repr(key)


def test_two_nodes_have_two_keys(tmp_path: Path) -> None:
    assert NodeKey.load_or_create(tmp_path / "a").node_id != NodeKey.load_or_create(tmp_path / "b").node_id


@POSIX
def test_the_key_file_is_private_from_the_start_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        NodeKey.load_or_create(tmp_path / "keys" / "node-key")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "keys" / "node-key") == 0o600
    assert mode_of(tmp_path / "keys") == 0o700


@POSIX
def test_a_key_that_others_may_read_is_made_private_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "node-key"
    key = NodeKey.load_or_create(path)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert NodeKey.load_or_create(path).node_id == key.node_id
    assert mode_of(path) == 0o600
    assert "Other users could read" in caplog.text


def damaged(content: bytes) -> dict[str, bytes]:
    value = json.loads(content)
    other = NodeKey.from_seed(bytes(32)).node_id
    return {
        "empty": b"",
        "cut": content[:40],
        "binary": b"\x80" * 32,
        "huge": content + b" " * 10_000,
        "another key": json.dumps(value | {"private_key": "11" * 32}).encode(),
        "another id": json.dumps(value | {"node_id": other}).encode(),
        "another format": json.dumps(value | {"format": 2}).encode(),
        "unknown field": json.dumps(value | {"x": 1}).encode(),
        "short key": json.dumps(value | {"private_key": "11"}).encode(),
    }


@pytest.mark.parametrize("kind", sorted(damaged(b'{"format": 1, "node_id": "", "private_key": ""}')))
def test_a_damaged_key_is_refused_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "node-key"
    NodeKey.load_or_create(path)
    content = damaged(path.read_bytes())[kind]
    path.write_bytes(content)
    with pytest.raises(StorageError, match="damaged") as caught:
        NodeKey.load_or_create(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_folder_in_the_way_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "node-key").mkdir()
    with pytest.raises(StorageError, match="node-key"):
        NodeKey.load_or_create(tmp_path / "node-key")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be"):
        NodeKey.load_or_create(tmp_path / "file" / "node-key")


@pytest.mark.parametrize("vector", VECTORS["peer_id"], ids=lambda v: v["peer_id"][-6:])
def test_the_node_id_is_the_libp2p_peer_id(vector: dict[str, str]) -> None:
    key = NodeKey.from_seed(bytes.fromhex(vector["seed"]))
    assert key.node_id == vector["peer_id"]
    assert public_key_of(vector["peer_id"]) == key.public_key


@given(st.binary(min_size=32, max_size=32))
def test_a_node_id_and_its_key_lead_to_each_other(public_key: bytes) -> None:
    node_id = node_id_of(public_key)
    assert node_id.startswith("12D3KooW")
    assert public_key_of(node_id) == public_key


@given(st.text(max_size=80))
def test_what_is_no_node_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a node id|not the peer id"):
        public_key_of(text)


def test_other_peer_ids_and_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="not the peer id of an Ed25519 key"):
        public_key_of("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")  # an RSA key's, from the libp2p specification
    with pytest.raises(ValueError, match="32 bytes"):
        node_id_of(bytes(31))


@pytest.mark.parametrize("added", [" ", "\n", "\t "])
def test_a_node_has_one_name_only(added: str) -> None:
    node_id = NodeKey.from_seed(bytes(32)).node_id
    with pytest.raises(ValueError, match="peer id"):
        public_key_of(node_id + added)
