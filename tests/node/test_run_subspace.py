"""The names of a run's file that compress activations in a subspace, and the reasons for which a run is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import NetworkRefusedError, UsageError
from neuroshard.identity import run_parameters_from_json, run_parameters_to_json
from neuroshard.model.subspace import subspace_of
from neuroshard.model.subspace_basis import basis_sha256, subspace_basis
from neuroshard.runs.run_file import model_warnings, new_parameters, read_run_config

PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512)


def made(folder: Path, architecture: str, rest: str = "num_stages = 2") -> RunParameters:
    text = f"{rest}\n[architecture]\ndepth = 6\n{architecture}"
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return new_parameters(read_run_config(folder / "run.toml"), PINS)


@pytest.mark.parametrize(
    ("entries", "rank", "free"),
    [
        ("use_compression = true", 48, 2),  # width 384, rate 8
        ("use_compression = true\ncompression_rate = 10", 38, 2),
        ("compression_rate = 2.5", 153, 2),
        ("compression_rate = 2", 192, 2),
        ("subspace_rank = 8", 8, 2),
        ("subspace_rank = 8\nuse_compression = true\nfree_blocks = 0", 8, 0),
        ("subspace_rank = 8\nfree_blocks = 3", 8, 3),
        ("use_compression = false\ncompression_rate = 100", 0, 0),
        ("use_compression = false\nsubspace_rank = 8\nfree_blocks = 1", 0, 0),
        ("subspace_rank = 0", 0, 0),
        ("", 0, 0),
        ("use_compression = true\nhidden_size = 4096\nhead_count = 32\nkey_value_head_count = 8", 40, 2),
    ],
)
def test_the_rank_follows_from_the_file(tmp_path: Path, entries: str, rank: int, free: int) -> None:
    parameters = made(tmp_path, entries)
    assert (parameters.architecture.subspace_rank, parameters.architecture.free_blocks) == (rank, free)
    assert run_parameters_from_json(run_parameters_to_json(parameters)) == parameters


def test_the_last_stage_limits_the_free_blocks(tmp_path: Path) -> None:
    assert made(tmp_path, "subspace_rank = 8", "stage_layers = [3, 2, 1]").architecture.free_blocks == 1


def test_a_plain_run_has_the_document_of_before(tmp_path: Path) -> None:
    written = run_parameters_to_json(made(tmp_path, ""))
    assert not [name for name in written if name.startswith("subspace")]
    architecture = written["architecture"]
    assert isinstance(architecture, dict)
    assert {"subspace_rank", "free_blocks"}.isdisjoint(architecture)


def test_the_digest_of_the_basis_is_signed(tmp_path: Path) -> None:
    parameters = made(tmp_path, "subspace_rank = 16", "num_stages = 2\ninitial_weights_seed = 9\nsubspace_cache_mb = 7")
    digest = basis_sha256(subspace_basis(384, 16, 9))
    assert (parameters.subspace_sha256, parameters.subspace_cache_mb) == (digest, 7)
    pinned = f'num_stages = 2\ninitial_weights_seed = 9\nsubspace_sha256 = "{digest}"'
    assert made(tmp_path, "subspace_rank = 16", pinned).subspace_sha256 == digest
    with pytest.raises(UsageError, match="is not the digest of this run's basis"):
        made(tmp_path, "subspace_rank = 17", pinned)


def test_a_computer_with_another_basis_does_not_join(tmp_path: Path) -> None:
    parameters = made(tmp_path, "subspace_rank = 16", "num_stages = 2\nsubspace_cache_mb = 1")
    subspace = subspace_of(parameters)
    assert subspace is not None
    assert subspace.basis.shape == (384, 16)
    assert subspace.row_limit == 512
    assert subspace_of(made(tmp_path, "")) is None
    for digest in ("0" * 64, ""):
        with pytest.raises(NetworkRefusedError, match="computes another basis"):
            subspace_of(replace(parameters, subspace_sha256=digest))


@pytest.mark.parametrize(
    ("entries", "rest", "words"),
    [
        ("subspace_rank = 7", "num_stages = 2", r"subspace_rank = 7 must be in 8\.\.192, half of hidden_size 384"),
        ("subspace_rank = 193", "num_stages = 2", r"subspace_rank = 193 must be in 8\.\.192"),
        ("subspace_rank = 1000", "num_stages = 2", "subspace_rank = 1000 must be in"),
        ("compression_rate = 50", "num_stages = 2", "subspace_rank = 7 must be in"),
        ("compression_rate = 1.5", "num_stages = 2", "compression_rate must be a number of at least 2.*not 1.5"),
        ("compression_rate = -8", "num_stages = 2", "compression_rate must be a number of at least 2"),
        ("compression_rate = 'x'", "num_stages = 2", "compression_rate must be a number of at least 2"),
        ("compression_rate = nan", "num_stages = 2", "compression_rate must be a number of at least 2"),
        ("compression_rate = true", "num_stages = 2", "compression_rate must be a number of at least 2"),
        ("use_compression = 1", "num_stages = 2", "use_compression must be true or false, not 1"),
        ("subspace_rank = 8\ncompression_rate = 8", "num_stages = 2", "both give the rank"),
        ("subspace_rank = 8", "num_stages = 1", "there is one stage only"),
        ("subspace_rank = 8", "", "there is one stage only"),
        (
            "subspace_rank = 8\nnorm_reorder = true\nqk_norm = 'head'",
            "num_stages = 2",
            "norm_reorder with trained scales leaves the subspace",
        ),
        ("subspace_rank = 8\nfree_blocks = 4", "num_stages = 2", "free_blocks = 4 is more than the 3 layers"),
        ("subspace_rank = 8\nfree_blocks = 2", "stage_layers = [5, 1]", "free_blocks = 2 is more than the 1 layers"),
        ("free_blocks = 1\nsubspace_rank = -8", "num_stages = 2", "subspace_rank"),
        (
            "subspace_rank = 10_000\nhidden_size = 65536\nhead_count = 512\nkey_value_head_count = 8",
            "num_stages = 2",
            "a basis of 655,360,000 numbers",
        ),
        ("", "num_stages = 2\nsubspace_cache_mb = 0", "subspace_cache_mb = 0 cannot be used"),
        ("", f"num_stages = 2\nsubspace_sha256 = '{'0' * 64}'", "there is no subspace"),
        ("subspace_rank = 8", "num_stages = 2\nsubspace_sha256 = 'abc'", "subspace_sha256"),
    ],
)
def test_a_run_is_refused_with_the_reason(tmp_path: Path, entries: str, rest: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(tmp_path, entries, rest)
    assert re.search(words, f"{caught.value.message} {caught.value.action}")


def test_the_owner_is_warned_before_signing() -> None:
    entries = {"depth": 6, "subspace_rank": 48}
    (warning,) = model_warnings({"architecture": entries})
    assert "56 bytes per token in int8 instead of 408, and of 204 in int4 without it" in warning
    assert "20 Mbit/s up, a million tokens take 43 s instead of 326 s, and of 163 s in int4" in warning
    assert model_warnings({"architecture": {"depth": 6}}) == ()
