"""What the owner is told about where the memory limit comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.config.loading import load_settings
from neuroshard.host.live_settings import Configuration, limit_source
from neuroshard.model.memory_limit import MemoryProbe, memory_bound

GB = 10**9
COMPUTER = "this computer's memory, less a reserve"


@pytest.mark.parametrize(
    ("flags", "variables", "file", "words"),
    [
        ({}, {}, "", COMPUTER),
        ({"memory": 900}, {"NEUROSHARD_MEMORY": "800"}, "memory = 700", "--memory"),
        ({}, {"NEUROSHARD_MEMORY": "800"}, "memory = 700", "NEUROSHARD_MEMORY"),
        ({}, {}, "memory = 700", "config.toml"),
        ({"memory": 900_000}, {}, "", COMPUTER),  # more than there is
    ],
)
def test_the_limit_is_named_after_what_set_it(
    tmp_path: Path, flags: dict[str, object], variables: dict[str, str], file: str, words: str
) -> None:
    (tmp_path / "config.toml").write_text(file)
    configuration = Configuration(load_settings({"data_dir": tmp_path, **flags}, variables))
    bound = memory_bound(MemoryProbe(32 * GB, None), configuration.settings.memory)
    assert limit_source(bound.by, configuration.source_of("memory")) == words


def test_a_container_is_named_when_its_limit_is_the_least() -> None:
    assert "control group" in limit_source(memory_bound(MemoryProbe(32 * GB, 4 * GB), 6_000).by, "flag")
