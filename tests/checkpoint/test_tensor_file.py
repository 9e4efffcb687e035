"""The safetensors format: exchangeable with the library, checked before anything is read."""

from __future__ import annotations

import io
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import CheckpointError
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.tensor_file import TensorLayout, read_layout, write_tensor_file
from tests.worlds.checkpoints import same, staged, tensors_at


def test_the_library_reads_our_file_and_we_read_the_layout_of_its(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    staging = staged(3)
    with ours.open("wb") as file:
        digest = write_tensor_file(file, staging.layout, staging.chunks())
    assert sha256(ours.read_bytes()).hexdigest() == digest
    assert same(safetensors.torch.load_file(ours), tensors_at(3))
    safetensors.torch.save_file(tensors_at(3), theirs)
    with theirs.open("rb") as file:
        layout, _ = read_layout(file, theirs.stat().st_size)
    assert {name: spec.shape for name, spec in layout.specs.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors_at(3).items()
    }


def file_with(header: object, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        (2**63).to_bytes(8, "little") + b"{}",
        (0).to_bytes(8, "little"),
        file_with(b"[1]", b""),
        file_with(b"{{{", b""),
        file_with(b"[" * 100_000, b""),
        file_with({"a": 1}),
        file_with(entry(dtype="F33")),
        file_with(entry(dtype=["F32"])),
        file_with(entry(shape=[3])),
        file_with(entry(shape=[-2])),
        file_with(entry(shape=[2.0])),
        file_with(entry(shape=[True, 2])),
        file_with(entry(shape=[1] * 9 + [2])),
        file_with(entry(shape=[2**47, 2**47, 0])),
        file_with(entry(shape=[0, 2**47, 2**47], data_offsets=[0, 0]), b""),
        file_with(entry(shape=[10**30])),
        file_with(entry(data_offsets=[0, 8, 8])),
        file_with(entry(data_offsets=[4, 12])),
        file_with(entry(data_offsets="ab")),
        file_with(entry(extra=1)),
        file_with(entry(), b"\0" * 9),
        file_with(entry(), b"\0" * 7),
        file_with(entry() | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"\0" * 12),
        file_with(entry() | {"b": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}, b"\0" * 10),
    ],
)
def test_impossible_headers_are_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_layout(io.BytesIO(content), len(content))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_describe_themselves(content: bytes) -> None:
    try:
        layout, header = read_layout(io.BytesIO(content), len(content))
    except CheckpointError:
        return
    assert len(header) + layout.data_bytes == len(content)


def test_a_huge_header_is_refused_before_it_is_read() -> None:
    prefix = io.BytesIO((1 << 40).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="header length"):
        read_layout(prefix, 1 << 41)


def test_a_write_can_be_given_up() -> None:
    staging = staged(1)
    with pytest.raises(InterruptedError):
        write_tensor_file(io.BytesIO(), staging.layout, staging.chunks(), lambda: True)


def test_types_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        TensorLayout.of({"a": torch.zeros(2, dtype=torch.complex64)})


def test_staging_takes_exactly_its_layout_and_only_when_free() -> None:
    tensors = tensors_at(1)
    staging = StagingBuffers(TensorLayout.of(tensors))
    with pytest.raises(ValueError, match="layout"):
        staging.copy_from({**tensors, "more": torch.zeros(1)})
    with pytest.raises(ValueError, match="layout says"):
        staging.copy_from({**tensors, "outer/anchor": torch.zeros(3)})
    staging.copy_from(tensors)
    staging.claim()
    with pytest.raises(RuntimeError, match="being written"):
        staging.copy_from(tensors)
    with pytest.raises(RuntimeError, match="being written"):
        staging.claim()
    staging.release()
    staging.copy_from(tensors_at(2))
    assert same(staging.tensors(), tensors_at(2))


def test_staging_copies_except_what_it_may_keep_by_reference() -> None:
    tensors = tensors_at(1)
    layout = TensorLayout.of(tensors)
    staging = StagingBuffers(layout, by_reference={"outer/anchor"})
    assert staging.allocated_bytes == layout.data_bytes - 200
    staging.copy_from(tensors)
    tensors["model/embedding.weight"].zero_()
    held = staging.tensors()
    assert held["outer/anchor"].data_ptr() == tensors["outer/anchor"].data_ptr()
    assert torch.equal(held["model/embedding.weight"], tensors_at(1)["model/embedding.weight"])
    with pytest.raises(ValueError, match="contiguous"):
        staging.copy_from({**tensors_at(1), "outer/anchor": torch.zeros(100)[::2]})
    staging.claim()
    staging.release()
    fresh = staging.destination("outer/anchor")
    assert fresh.shape == (50,)
    assert staging.tensors()["outer/anchor"] is fresh
