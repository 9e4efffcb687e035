"""How far a data set is: from what is published and what its populator noted, in a folder, behind a URL, served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from neuroshard.cli.main import app
from neuroshard.data.manifest import DataSetManifest, SourceCount
from neuroshard.dataset import GenesisServer, read_status
from neuroshard.dataset.batches import Mark
from neuroshard.dataset.destination import FolderDestination, open_place
from neuroshard.dataset.population_state import Checkpoints, SourceCheckpoint
from neuroshard.dataset.status import SourceStatus, status_of
from neuroshard.errors import DataError
from tests.worlds.data_sets import TestSigner, write_genesis

WEB = SourceCheckpoint(
    "web", target_shards=500, mark=Mark({}, 0, 4200, 7), shards=5, last_shard_id=4, timestamp="2026-01-02T00:00:00Z"
)
NEXT = SourceCheckpoint("next", target_shards=20)
MADE = Checkpoints("ab" * 32, 1000, 400, 5, 5 * 3200, sources={"web": WEB, "next": NEXT})
PUBLISHED = DataSetManifest(total_shards=3, sources={"web": SourceCount(3, 1200, 2500, 2)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_genesis(tmp_path, shards=3, tokens=400, signer=TestSigner())
    (tmp_path / "checkpoints.json").write_bytes(MADE.to_json())
    return tmp_path


def test_the_populators_state_is_ahead_of_what_is_published() -> None:
    found = status_of(PUBLISHED, MADE)
    assert found.unpublished_shards == 2
    assert found.sources["web"] == SourceStatus(5, 3, 2000, 4200, 7, 4, 500, "2026-01-02T00:00:00Z")
    assert (found.sources["next"].shards, found.sources["next"].target_shards) == (0, 20)


def test_without_its_populators_state_the_manifest_tells_what_it_knows() -> None:
    found = status_of(PUBLISHED, None)
    assert found.sources == {"web": SourceStatus(3, 3, 1200, 2500, 0, 2, None, "")}
    assert found.unpublished_shards == 0


def test_an_old_state_beside_a_newer_manifest_hides_nothing() -> None:
    old = replace(MADE, total_shards=1, sources={"web": replace(WEB, shards=1)})
    assert status_of(PUBLISHED, old).sources["web"].shards == 3


def test_what_is_made_and_not_published_has_a_status(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    found = read_status(FolderDestination(folder))
    assert (found.manifest, found.unpublished_shards) == (None, 5)
    shown = CliRunner().invoke(app, ["genesis", "status", str(folder)])
    assert "Nothing is published yet." in shown.output
    assert "5 more shards are ready" in shown.output


def test_a_damaged_state_is_told_beside_the_rest(folder: Path) -> None:
    (folder / "checkpoints.json").write_text("{")
    found = read_status(FolderDestination(folder))
    assert found.manifest is not None
    assert "checkpoints.json is damaged" in found.problem


def test_where_nothing_is_there_is_no_status(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither manifest\.json nor checkpoints\.json"):
        read_status(FolderDestination(tmp_path))


def test_the_command_shows_it_for_people_and_programs(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["genesis", "status", str(folder)])
    assert shown.exit_code == 0
    assert "3 shards, 1,200 tokens" in shown.output
    assert "- web: 5 of 500 shards, 2,000 tokens, 4,200 documents (7 skipped), last change 2026-01-02T00:00:00Z" in (
        shown.output
    )
    told = json.loads(CliRunner().invoke(app, ["genesis", "status", str(folder), "--json"]).output)
    assert (told["total_shards"], told["unpublished_shards"]) == (3, 2)
    assert told["sources"]["web"]["target_shards"] == 500


def test_it_is_served_and_follows_the_folder(folder: Path) -> None:
    with GenesisServer(folder) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/status").json()["sources"]["web"]["shards"] == 5
        further = replace(MADE, total_shards=6, sources={"web": replace(WEB, shards=6)})
        FolderDestination(folder).write("checkpoints.json", further.to_json())
        assert client.get("/status").json()["sources"]["web"]["shards"] == 6
        place = open_place(server.url)
        assert read_status(place).sources["web"].shards == 6
        place.close()
