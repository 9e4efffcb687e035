"""Sources made up for tests of the populator, and running it on them."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Event
from time import monotonic

from neuroshard.dataset.destination import Destination, FolderDestination
from neuroshard.dataset.population import (
    PopulationDependencies,
    PopulationOptions,
    PopulationPlan,
    PopulationReport,
    populate,
)
from neuroshard.dataset.progress import ProgressPrinter
from neuroshard.dataset.sources import PopulationConfiguration
from tests.data.genesis_samples import TestSigner

NOW = "2025-01-01T00:00:00+00:00"
SHARD_TOKENS = 4_096


def made_up_texts(count: int, seed: int = 1, lines: int = 12) -> list[str]:
    """Documents of random words, every one different."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 7))) for _ in range(500)]
    return [
        "".join(" ".join(chance.choices(words, k=9)) + "\n" for _ in range(chance.randint(1, lines)))
        for _ in range(count)
    ]


def write_json_lines(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    """A JSON Lines file with these documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def configured(
    *sources: dict[str, object], merges: int = 60, shard_tokens: int = SHARD_TOKENS
) -> PopulationConfiguration:
    """A configuration with a small vocabulary."""
    vocabulary = {"merges": merges, "first_source_merges": min(20, merges), "sample_documents": 50}
    content = {"sources": list(sources), "vocabulary": vocabulary, "tokens_per_shard": shard_tokens}
    return PopulationConfiguration.model_validate(content)


def json_source(path: Path, name: str = "lines", target: int = 1_000, **more: object) -> dict[str, object]:
    """A source of JSON Lines."""
    return {"name": name, "kind": "jsonl", "location": str(path), "target_shards": target, **more}


def run_population(
    configuration: PopulationConfiguration,
    out: Destination | Path,
    *,
    workers: int = 1,
    stop: Event | None = None,
    date: Callable[[], str] = lambda: NOW,
    publish_seconds: float = 1000.0,
    pauses: Sequence[float] = (),
    follow_seconds: float | None = None,
) -> PopulationReport:
    """Run the populator; its logs lie beside the folder, its progress is thrown away."""
    logs = (out if isinstance(out, Path) else Path(out.description)).parent / "logs"
    destination = FolderDestination(out) if isinstance(out, Path) else out
    options = PopulationOptions(workers, logs, publish_seconds, follow_seconds, pauses)
    surroundings = PopulationDependencies(date, monotonic, stop or Event(), ProgressPrinter(io.StringIO(), monotonic))
    plan = PopulationPlan.of(configuration, follows=follow_seconds is not None)
    return populate(plan, destination, TestSigner(), options, surroundings)


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every published file by its name."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
