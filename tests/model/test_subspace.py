"""The subspace of activations: bits from a counter, the basis and the frozen rows, with the same bytes everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuroshard.model.subspace import Subspace, frozen_rows
from neuroshard.model.subspace_basis import basis_sha256, philox, subspace_basis, subspace_key
from neuroshard.types import Architecture

SHAPE = Architecture(32, 4, 4, 2, 48, 50, 16, subspace_rank=8, free_blocks=1)
SEED = 11

# Random123's known answers: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
words = st.integers(0, 2**32 - 1)


def parsed(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in the paper, with Python's integers."""
    first, second, third, fourth = counter
    low, high = key
    for _ in range(10):
        a, b = 0xD2511F53 * first, 0xCD9E8D57 * third
        first, second, third, fourth = (b >> 32) ^ second ^ low, b % 2**32, (a >> 32) ^ fourth ^ high, a % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return [first, second, third, fourth]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_gives_the_known_answers(counter: str, key: str, output: str) -> None:
    first, second, third, fourth = parsed(counter)
    low, high = parsed(key)
    one = np.array
    in_numpy = philox((one([first]), one([second]), one([third]), one([fourth])), (low, high))
    assert [int(word[0]) for word in in_numpy] == parsed(output)
    tensor = torch.tensor
    in_torch = philox((tensor([first]), tensor([second]), tensor([third]), tensor([fourth])), (low, high))
    assert [int(word[0]) for word in in_torch] == parsed(output)
    assert reference(parsed(counter), parsed(key)) == parsed(output)


@given(counter=st.lists(words, min_size=4, max_size=4), key=st.tuples(words, words))
@settings(max_examples=50, deadline=None)
def test_philox_equals_the_paper_for_any_words(counter: list[int], key: tuple[int, int]) -> None:
    first, second, third, fourth = (torch.tensor([word]) for word in counter)
    assert [int(word[0]) for word in philox((first, second, third, fourth), key)] == reference(counter, list(key))


def test_a_frozen_row_is_the_words_of_its_counters() -> None:
    key = subspace_key(SEED)
    assert key == (1427748154, 2882954907)
    rows = frozen_rows(torch.tensor([0, 7, 2**31 - 1]), 10, key)
    for row, token in zip(rows.tolist(), (0, 7, 2**31 - 1), strict=True):
        of_token = [word for column in range(3) for word in reference([column, token, 0, 0], list(key))]
        scale = np.float32(3**0.5 / 2**23)
        assert row == [float(np.float32((word >> 8) - 2**23) * scale) for word in of_token[:10]]


def test_frozen_rows_are_uniform_with_deviation_one() -> None:
    rows = frozen_rows(torch.arange(400), 256, subspace_key(SEED))
    assert rows.std().item() == pytest.approx(1, rel=0.01)
    assert rows.mean().item() == pytest.approx(0, abs=0.01)
    assert 1.7 < rows.max().item() <= 3**0.5
    assert rows.unique(dim=0).shape == rows.shape


@pytest.mark.parametrize("count", [1, 3, 200])
def test_rows_do_not_depend_on_how_many_are_drawn(count: int) -> None:
    width = 1030  # 4 does not divide it
    many = frozen_rows(torch.arange(count), width, subspace_key(SEED))
    for row in range(0, count, 37):
        assert torch.equal(frozen_rows(torch.tensor([row]), width, subspace_key(SEED))[0], many[row])


def drawn_columns(width: int, rank: int) -> Tensor:
    """The columns before Gram-Schmidt, as a reference in plain Python."""
    key, rows = list(subspace_key(SEED)), list[list[float]]()
    for row in range(width):
        of_row = [word for column in range(-(-rank // 4)) for word in reference([column, row, 1, 0], key)]
        rows.append([float(np.float32((word >> 8) - 2**23) * np.float32(3**0.5 / 2**23)) for word in of_row[:rank]])
    return torch.tensor(rows)


@pytest.mark.parametrize(("width", "rank"), [(32, 8), (100, 9), (256, 32), (16, 16)])
def test_the_basis_is_orthonormal(width: int, rank: int) -> None:
    basis = torch.from_numpy(subspace_basis(width, rank, SEED))
    assert basis.shape == (width, rank)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(rank), atol=1e-6, rtol=0)


def test_the_basis_spans_the_drawn_columns() -> None:
    drawn = drawn_columns(64, 12)
    basis = torch.from_numpy(subspace_basis(64, 12, SEED))
    torch.testing.assert_close(basis @ (basis.t() @ drawn), drawn, atol=1e-5, rtol=0)


def tree(values: list[float]) -> float:
    values = values + [0.0] * ((1 << (len(values) - 1).bit_length()) - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def test_the_basis_equals_gram_schmidt_in_plain_python() -> None:
    """Column by column with Python's floats, which are IEEE doubles."""
    columns = drawn_columns(22, 5).double().t().tolist()
    for _ in range(2):
        done = list[list[float]]()
        for column in columns:
            rest = column
            for other in done:
                shared = tree([a * b for a, b in zip(other, rest, strict=True)])
                rest = [value - a * shared for value, a in zip(rest, other, strict=True)]
            length = tree([value * value for value in rest]) ** 0.5
            done.append([value / length for value in rest])
        columns = done
    assert torch.equal(
        torch.from_numpy(subspace_basis(22, 5, SEED)), torch.tensor(columns, dtype=torch.float64).t().float()
    )


def test_the_basis_has_recorded_bytes() -> None:
    recorded = "fcd3d720a607079bd397f3f855357a00a7eb4d8d15a58c16b16020fab8b6100d"
    assert basis_sha256(subspace_basis(256, 32, SEED)) == recorded
    assert basis_sha256(subspace_basis(256, 32, SEED + 1)) != recorded


def fresh(ids: Tensor) -> Tensor:
    return frozen_rows(ids.flatten(), SHAPE.hidden_size, subspace_key(SEED)).view(*ids.shape, -1)


@given(
    batches=st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=20), min_size=1, max_size=8),
    rows=st.integers(1, 50),
)
@settings(max_examples=60, deadline=None)
def test_a_full_cache_changes_no_row(batches: list[list[int]], rows: int) -> None:
    subspace = Subspace(SHAPE, SEED)
    subspace.row_limit = rows
    for batch in batches:
        ids = torch.tensor([batch])
        assert torch.equal(subspace.frozen_rows(ids), fresh(ids))
        assert subspace.cached_rows <= rows


def test_the_cache_has_the_size_of_its_limit() -> None:
    wide = Architecture(4096, 4, 4, 2, 48, 50_265, 16, subspace_rank=8, free_blocks=1)
    assert Subspace(wide, SEED, 64).row_limit == 3_906
    assert Subspace(SHAPE, SEED, 64).row_limit == 50
