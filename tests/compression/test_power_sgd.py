"""PowerSGD's factors: what is exact, what is lost, what comes back, and the same bits everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from neuroshard.compression import next_residual, with_residual
from neuroshard.compression.power_sgd import (
    FactorPlan,
    first_right,
    left_factors,
    next_right,
    orthonormal,
    orthonormal_basis,
    projection,
    restored_vector,
)

PLAN = FactorPlan.of([(300, 211), (7,), (97, 500), (64, 64)], 16)


def made(length: int, start: int) -> NDArray[np.float32]:
    """Numbers of many sizes from whole numbers, so that no generator's version matters."""
    index = np.arange(start, start + length, dtype=np.uint64)
    bits = (index * np.uint64(2654435761) + np.uint64(12345)) % np.uint64(2**32)
    return ((bits % 2003).astype(np.float32) - 1001) * np.float32(2) ** -(bits >> 20).astype(np.float32).__mod__(30)


def digests() -> list[str]:
    """Of the first Q, a basis, a gradient and the next Q."""
    left, projected = (torch.from_numpy(made(n, n)) for n in (PLAN.left_length, PLAN.projection_length))
    basis = orthonormal_basis(PLAN, left)
    agreed = first_right(PLAN, 5), basis, restored_vector(PLAN, projected, basis), next_right(PLAN, projected, 5, 1)
    return [sha256(vector.numpy().tobytes()).hexdigest() for vector in agreed]


VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "compression.json").read_text("utf-8"))
LARGEST = float(np.finfo(np.float32).max)
SHAPES = [(40, 30), (30,), (1, 1), (17, 61), (12, 4, 9), (3, 3)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_rank(rank: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 100)


def averaged(plan: FactorPlan, vectors: list[torch.Tensor], right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Basis and mean projection of members with these vectors."""
    left = torch.stack([left_factors(plan, vector, right) for vector in vectors]).mean(dim=0)
    basis = orthonormal_basis(plan, left)
    return basis, torch.stack([projection(plan, vector, basis) for vector in vectors]).mean(dim=0)


def test_shapes_decide_what_has_factors() -> None:
    plan = FactorPlan.of(SHAPES, 4)
    assert [(m.start, m.rows, m.columns) for m in plan.matrices] == [(0, 40, 30), (1231, 17, 61), (2268, 12, 36)]
    assert plan.length == 1200 + 30 + 1 + 1037 + 432 + 9
    assert (plan.left_length, plan.right_length) == (4 * (40 + 17 + 12), 4 * (30 + 61 + 36))
    assert plan.plain_length == 30 + 1 + 9
    assert plan.projection_length == plan.plain_length + plan.right_length


@pytest.mark.parametrize(("rank", "has_factors"), [(1, True), (8, True), (9, False), (64, False)])
def test_factors_of_more_than_half_the_numbers_are_none(rank: int, has_factors: bool) -> None:
    assert bool(FactorPlan.of([(32, 32)], rank).matrices) is has_factors  # 8 * 64 is half of 1,024


@pytest.mark.parametrize(("shapes", "rank"), [([(4, 4)], 0), ([], 4), ([(0, 3)], 4)])
def test_no_factors_without_rank_or_numbers(shapes: list[tuple[int, ...]], rank: int) -> None:
    with pytest.raises(ValueError, match="a rank and a vector"):
        FactorPlan.of(shapes, rank)


@given(rank=st.integers(1, 6), rows=st.integers(12, 60), columns=st.integers(12, 60), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_matrices_of_the_rank_or_less_come_back(rank: int, rows: int, columns: int, seed: int) -> None:
    plan = FactorPlan.of([(rows, columns), (7,)], 6)
    vector = torch.cat([of_rank(rank, rows, columns, seed).flatten(), normal(7, seed=seed)])
    basis, mean = averaged(plan, [vector], first_right(plan, seed))
    back = restored_vector(plan, mean, basis)
    torch.testing.assert_close(back, vector, atol=2e-5 * float(vector.abs().max()), rtol=0)
    assert torch.equal(back[-7:], vector[-7:])  # the plain numbers, to the bit


@given(rows=st.integers(12, 50), columns=st.integers(12, 50), seed=st.integers(0, 99), members=st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_the_gradient_is_the_mean_projected_and_what_is_lost_is_shorter(
    rows: int, columns: int, seed: int, members: int
) -> None:
    plan = FactorPlan.of([(rows, columns)], 3)
    vectors = [normal(rows * columns, seed=seed * 10 + member) for member in range(members)]
    basis, mean = averaged(plan, vectors, first_right(plan, seed))
    whole = torch.stack(vectors).mean(dim=0).double()
    back = restored_vector(plan, mean, basis).double()
    span = basis.view(3, rows).double()
    torch.testing.assert_close(back.view(rows, columns), span.T @ (span @ whole.view(rows, columns)), atol=1e-5, rtol=0)
    # |M|^2 = |projected|^2 + |lost|^2
    assert float((whole - back).square().sum()) == pytest.approx(
        float(whole.square().sum() - back.square().sum()), rel=1e-4
    )


def test_the_basis_follows_the_largest_directions() -> None:
    """Steps over the same matrix come to the loss of the best approximation of that rank."""
    spectrum = torch.diag(torch.tensor([0.8**i for i in range(24)]))
    ortho = [torch.linalg.qr(normal(24, 24, seed=seed)).Q for seed in (1, 2)]
    matrix = ortho[0] @ spectrum @ ortho[1]
    plan, vector = FactorPlan.of([(24, 24)], 4), matrix.flatten().contiguous()
    best = float(torch.linalg.svdvals(matrix)[4:].square().sum())
    right, lost = first_right(plan, 0), list[float]()
    for step in range(1, 20):
        basis, mean = averaged(plan, [vector], right)
        lost.append(float((vector - restored_vector(plan, mean, basis)).square().sum()))
        right = next_right(plan, mean, 0, step)
    assert lost[0] > 1.02 * best
    assert lost[-1] == pytest.approx(best, rel=1e-3)
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(lost))


def test_what_is_lost_comes_later() -> None:
    """Of the same gradients at every step all is applied in the end: what is missing is the residual alone."""
    plan, gradients = FactorPlan.of([(32, 24), (5,)], 3), [normal(32 * 24 + 5, seed=seed) for seed in range(3)]
    right, residuals = first_right(plan, 0), list[torch.Tensor | None]([None] * 3)
    applied, longest = torch.zeros(plan.length), 0.0
    for step in range(1, 41):
        vectors = [with_residual(g, residual) for g, residual in zip(gradients, residuals, strict=True)]
        basis, mean = averaged(plan, vectors, right)
        residuals = [next_residual(v, restored_vector(plan, projection(plan, v, basis), basis)) for v in vectors]
        applied += restored_vector(plan, mean, basis)
        right = next_right(plan, mean, 0, step)
        kept = torch.stack([residual for residual in residuals if residual is not None]).mean(dim=0)
        torch.testing.assert_close(
            applied + kept, step * torch.stack(gradients).mean(dim=0), atol=1e-3 * step, rtol=1e-4
        )
        longest = max(longest, float(kept.norm()))
    assert longest < 20 * float(torch.stack(gradients).mean(dim=0).norm())  # it does not grow without end


@pytest.mark.parametrize("count", [1, 2, 5, 64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_become_orthonormal_whatever_their_sizes(count: int, scale: float) -> None:
    rows = (normal(count, 301) + 30 * normal(1, 301, seed=3)) * scale  # nearly the same direction all
    found = orthonormal(rows.numpy()).astype(np.float64)
    np.testing.assert_allclose(found @ found.T, np.eye(count), atol=2.0**-20)
    assert (found * 2**24 == np.rint(found * 2**24)).all()


def test_rows_without_a_direction_of_their_own_become_zeros() -> None:
    rows = normal(7, 50).numpy()
    rows[1] = 0
    rows[2] = 3 * rows[0]
    rows[3] = np.inf
    rows[4, 7] = np.nan
    rows[5] = rows[0] - rows[2]
    found = orthonormal(rows)
    assert [bool(row.any()) for row in found] == [True, False, False, False, False, False, True]
    np.testing.assert_allclose(found[[0, 6]] @ found[[0, 6]].T, np.eye(2), atol=2.0**-20)


def test_more_rows_than_numbers_span_no_more_than_these() -> None:
    found = orthonormal(normal(5, 2).numpy())
    assert [bool(row.any()) for row in found] == [True, True, False, False, False]


def test_columns_without_a_direction_are_drawn_anew() -> None:
    plan = FactorPlan.of([(30, 30), (30, 30)], 4)
    vector = torch.cat([of_rank(1, 30, 30).flatten(), torch.zeros(900)])
    basis, mean = averaged(plan, [vector], first_right(plan, 0))
    nexts = [next_right(plan, mean, 0, step).view(2, 4, 30) for step in (1, 2)]
    assert torch.equal(nexts[0][0, 0], nexts[1][0, 0])  # it has one, and keeps it
    assert not torch.equal(nexts[0][0, 1:], nexts[1][0, 1:])
    assert all(bool(row.any()) for right in nexts for row in right.reshape(-1, 30))
    other = torch.cat([vector[:900], normal(900)])  # what the second matrix learns later is not lost
    basis, mean = averaged(plan, [other], nexts[0].reshape(-1))
    assert float(restored_vector(plan, mean, basis)[900:].norm()) > 0.2 * float(other[900:].norm())


def test_the_next_q_has_the_directions_of_the_mean_and_ordinary_sizes() -> None:
    plan = FactorPlan.of([(30, 30)], 4)
    mean = normal(plan.projection_length) * torch.tensor([1e-30, 1, 1e30, 1e-40])[:, None].expand(4, 30).flatten()
    right = next_right(plan, mean.contiguous(), 0, 1).view(4, 30)
    assert bool(((right.abs().amax(dim=1) >= 0.5) & (right.abs().amax(dim=1) < 1)).all())
    ratios = right.double() / mean.view(4, 30).double()
    assert all(len(set(row.tolist())) == 1 for row in ratios)  # by one power of two each


@pytest.mark.parametrize("shapes", [[(1, 1)], [(1,)], [(1, 400)], [(400, 1)], [(2, 3), (1,)], [(3, 3), (31, 29)]])
def test_odd_sizes(shapes: list[tuple[int, ...]]) -> None:
    plan = FactorPlan.of(shapes, 2)
    vector = normal(plan.length)
    basis, mean = averaged(plan, [vector], first_right(plan, 0))
    back = restored_vector(plan, mean, basis)
    assert back.isfinite().all()
    assert float((vector - back).norm()) <= float(vector.norm()) * (1 + 1e-5)
    if not plan.matrices:
        assert torch.equal(back, vector)


def test_zeros_and_one_huge_value() -> None:
    plan = FactorPlan.of([(40, 30), (3,)], 2)
    vector = torch.zeros(plan.length)
    basis, mean = averaged(plan, [vector], first_right(plan, 0))
    assert torch.equal(restored_vector(plan, mean, basis), vector)
    vector[77] = LARGEST
    vector[-1] = -LARGEST
    basis, mean = averaged(plan, [vector], first_right(plan, 0))
    back = restored_vector(plan, mean, basis)
    torch.testing.assert_close(back, vector, rtol=1e-6, atol=LARGEST * 1e-6)
    assert back.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 600, 1201])
def test_numbers_that_are_not_finite_have_no_factors(bad: float, place: int) -> None:
    plan = FactorPlan.of([(40, 30), (3,)], 2)
    vector = normal(plan.length)
    right = first_right(plan, 0)
    basis, _ = averaged(plan, [vector], right)
    vector[place] = bad
    with pytest.raises(ValueError, match="not finite"):
        projection(plan, vector, basis)
    if place < 1200:
        with pytest.raises(ValueError, match="not finite"):
            left_factors(plan, vector, right)


def test_what_was_agreed_on_and_is_not_finite_shows_in_the_result() -> None:
    """Whoever votes on it sees that; nothing raises, and the next step has directions again."""
    plan = FactorPlan.of([(40, 30), (30, 30), (3,)], 2)
    basis = orthonormal_basis(plan, torch.full((plan.left_length,), torch.nan))
    assert not basis.any()
    mean = torch.zeros(plan.projection_length)
    mean[3] = torch.inf
    back = restored_vector(plan, mean, basis)
    assert back[:1200].isnan().all()
    assert not back[1200:].any()
    assert next_right(plan, mean, 0, 1).isfinite().all()


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(1203, dtype=torch.float64), torch.zeros(3, 401)])
def test_vectors_that_do_not_fit(wrong: torch.Tensor) -> None:
    plan = FactorPlan.of([(40, 30), (3,)], 2)
    basis = torch.zeros(plan.left_length)
    for call in (
        lambda: left_factors(plan, wrong, first_right(plan, 0)),
        lambda: left_factors(plan, torch.zeros(1203), wrong),
        lambda: orthonormal_basis(plan, wrong),
        lambda: projection(plan, wrong, basis),
        lambda: projection(plan, torch.zeros(1203), wrong),
        lambda: restored_vector(plan, wrong, basis),
        lambda: next_right(plan, wrong, 0, 1),
    ):
        with pytest.raises(ValueError, match=r"numbers here|fp32 CPU"):
            call()


def test_a_cold_start_is_the_same_for_the_same_seed() -> None:
    plan = FactorPlan.of([(40, 30), (30, 40)], 4)
    right = first_right(plan, 7)
    assert torch.equal(right, first_right(plan, 7))
    assert not torch.equal(right, first_right(plan, 8))
    assert len({row.numpy().tobytes() for row in [*right[:120].view(4, 30), *right[120:].view(4, 40)]}) == 8
    assert bool((right.abs() < 1).all())
    assert float(right.mean().abs()) < 0.15


def test_a_product_is_exact_in_any_order() -> None:
    """Of whole numbers within float64's reach: the columns of the basis and Q's rows in another order change no bit."""
    plan, rank = FactorPlan.of([(300, 280)], 64), 64
    basis = orthonormal_basis(plan, normal(plan.left_length))
    mean = normal(plan.projection_length)
    order = torch.randperm(rank, generator=torch.Generator().manual_seed(1))
    shuffled = basis.view(rank, 300)[order].flatten(), mean.view(rank, 280)[order].flatten()
    assert torch.equal(restored_vector(plan, mean, basis), restored_vector(plan, shuffled[1], shuffled[0]))


def test_kernels_and_threads_change_no_bit_of_what_is_agreed() -> None:
    program = Path(__file__)
    expected = VECTORS["power_sgd_digests"]
    assert digests() == expected
    fewer = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX2 FMA3"
    for kernels in (
        {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": fewer, "OPENBLAS_NUM_THREADS": "1"},
        {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "2"},
    ):
        environment = {**os.environ, **kernels, "PYTHONPATH": str(program.parents[2])}
        done = subprocess.run(
            [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.split() == expected, (kernels, done.stderr)


if __name__ == "__main__":
    sys.stdout.write(" ".join(digests()))
