"""A data folder whose run is fixed beforehand, so that a node trains the model that a benchmark wants."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from benchmarks.node_process import TOKEN
from benchmarks.sizes import IS_TINY
from benchmarks.texts import write_topics
from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.data.manifest import parse_manifest
from neuroshard.data.tokenizer import TokenizerTable
from neuroshard.dataset import BuildOptions, FolderText, StandardLibraryText, build_genesis
from neuroshard.identity import Wallet, parse_token
from neuroshard.runs.stored_runs import LocalRuns
from neuroshard.types import Architecture


def build_data(folder: Path, vocabulary: int, texts: Path | None = None) -> tuple[GenesisPins, int]:
    """A Genesis folder from the files of a folder, or from Python's documentation; its pins and the ids in use."""
    wallet = Wallet.from_secret(parse_token(TOKEN))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    texts = write_topics(folder.with_name("text")) if IS_TINY else texts
    text = StandardLibraryText() if texts is None else FolderText(texts)
    build_genesis(text, folder, wallet, now=now, options=BuildOptions(vocabulary=vocabulary))
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    tokenizer = (folder / "tokenizer.json").read_bytes()
    table = TokenizerTable.load(tokenizer)
    pins = GenesisPins(
        root=manifest.root(),
        total_shards=manifest.total_shards,
        signing_key=manifest.signing_key,
        tokenizer_sha256=sha256(tokenizer).hexdigest(),
        next_merge_id=table.next_merge_id,
    )
    return pins, table.next_merge_id


def fix_run(
    data_dir: Path, pins: GenesisPins, architecture: Architecture, batch_size: int, learning_rate: float
) -> RunParameters:
    """Store the run that a node with the benchmark's token will find in this data folder."""
    parameters = RunParameters(
        name="benchmark",
        version=1,
        architecture=architecture,
        stage_count=1,
        batch_size=batch_size,
        sequences_per_step=batch_size,
        initial_weights_seed=1,
        genesis=pins,
        inner=InnerOptimization(learning_rate=learning_rate),
        outer=OuterOptimization(),
    )
    LocalRuns(data_dir, Wallet.from_secret(parse_token(TOKEN))).create(parameters)
    return parameters
