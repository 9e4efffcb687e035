from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from neuroshard.dataset.population import merge_shares
from neuroshard.dataset.sources import (
    SHIPPED_CONFIGURATION,
    PopulationConfiguration,
    SourceConfiguration,
    load_configuration,
)
from neuroshard.errors import StorageError, UsageError

ONE = '[[sources]]\nname = "one"\nkind = "text"\nlocation = "texts"\ntarget_shards = 20\n'


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def test_the_shipped_configuration_has_five_sources_of_which_one_runs() -> None:
    shipped = load_configuration(Path(SHIPPED_CONFIGURATION))
    assert {source.name: source.target_shards for source in shipped.sources} == {
        "fineweb-edu": 500_000,
        "fineweb": 50_000,
        "redpajama": 3_000,
        "slimpajama": 2_000,
        "c4": 1_000,
    }
    assert [source.name for source in shipped.active()] == ["fineweb-edu"]
    assert {source.kind for source in shipped.sources} == {"huggingface"}


def targets_of(sources: Sequence[SourceConfiguration]) -> dict[str, int]:
    return {source.name: source.target_shards for source in sources}


def test_merges_are_split_as_the_shipped_sources_are_large() -> None:
    shipped = load_configuration(Path(SHIPPED_CONFIGURATION))
    shares = merge_shares(targets_of(shipped.sources), shipped.vocabulary)
    assert shares == {"fineweb-edu": 2_500, "fineweb": 26_102, "redpajama": 1_566, "slimpajama": 1_044, "c4": 522}
    assert sum(shares.values()) == 31_734
    assert merge_shares(targets_of(shipped.active()), shipped.vocabulary) == {"fineweb-edu": 31_734}


def test_sources_run_by_priority_and_then_as_they_stand(tmp_path: Path) -> None:
    names = {"late": 5, "first": -1, "a": 2, "b": 2}
    parts = [ONE.replace('"one"', f'"{name}"') + f"priority = {priority}\n" for name, priority in names.items()]
    parts.append(ONE.replace('"one"', '"asleep"') + "enabled = false\n")
    configuration = load_configuration(write(tmp_path / "s.toml", "\n".join(parts)))
    assert [source.name for source in configuration.active()] == ["first", "a", "b", "late"]


def test_local_places_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    text = ONE + ONE.replace('"one"', '"hub"').replace('"text"', '"huggingface"').replace('"texts"', '"some/set"')
    text += ONE.replace('"one"', '"local"').replace('"text"', '"huggingface"').replace('"texts"', '"./set"')
    one, hub, local = load_configuration(write(tmp_path / "s.toml", text)).sources
    assert (one.location, hub.location) == (str(tmp_path / "texts"), "some/set")
    assert Path(local.location) == tmp_path / "set"


@pytest.mark.parametrize("form", ["list", "object", "bare"])
def test_the_classic_form_is_read(tmp_path: Path, form: str) -> None:
    item = {"hf_path": "org/set", "hf_name": "en", "target_shards": 100, "priority": 3, "enabled": True}
    named = {"name": "classic", **item}
    content = {"list": {"sources": [named]}, "object": {"sources": {"classic": item}}, "bare": [named]}[form]
    (source,) = load_configuration(write(tmp_path / "s.json", json.dumps(content))).sources
    assert (source.name, source.kind, source.location, source.subset) == ("classic", "huggingface", "org/set", "en")
    assert (source.text_field, source.target_shards, source.priority) == ("text", 100, 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ONE + "target_shard = 3\n", "source 'one', target_shard:"),
        (ONE.replace("target_shards = 20", "target_shards = 0"), "source 'one', target_shards:"),
        (ONE.replace("target_shards = 20", 'target_shards = "20"'), "source 'one', target_shards:"),
        (ONE.replace("target_shards = 20\n", ""), "source 'one', target_shards: Field required"),
        (ONE.replace('"text"', '"csv"'), "source 'one', kind:"),
        (ONE.replace('name = "one"\n', ""), "source number 1, name:"),
        (ONE.replace('"one"', '"../one"'), "source '../one', name:"),
        (ONE + ONE, "two sources have the name 'one'"),
        (ONE + "enabled = false\n", "no source is enabled"),
        (ONE.replace("20", "15"), "have 15 target_shards together"),
        (ONE + 'subset = "x"\n', "source 'one', subset:"),
        (ONE + "[vocabulary]\nmerges = -1\n", "vocabulary, merges:"),
        ("tokens_per_shard = 10\n" + ONE, "tokens_per_shard:"),
        ("x = [", "is not TOML"),
        ("", "names no sources"),
        ("sources = 3", "names no sources"),
    ],
)
def test_a_mistake_is_told_with_file_source_and_field(tmp_path: Path, content: str, said: str) -> None:
    file = write(tmp_path / "s.toml", content)
    with pytest.raises(UsageError) as told:
        load_configuration(file)
    assert str(file) in told.value.message
    assert said in told.value.message


@pytest.mark.parametrize("content", ["3", "[3]", '{"sources": [3]}', "[" * 100_000, '{"sources": {"a": 3}}'])
def test_json_of_another_shape_is_told(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match=r"s\.json"):
        load_configuration(write(tmp_path / "s.json", content))


def test_both_names_of_one_thing_are_refused(tmp_path: Path) -> None:
    content = json.dumps([{"name": "a", "hf_path": "x/y", "location": "z", "target_shards": 20}])
    with pytest.raises(UsageError, match="both hf_path and location"):
        load_configuration(write(tmp_path / "s.json", content))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"s\.toml cannot be read"):
        load_configuration(tmp_path / "s.toml")


@pytest.mark.parametrize(
    ("merges", "first", "weights"), [(100, 2_500, [3, 1]), (31_734, 2_500, [5, 7, 7, 7]), (0, 5, [1, 1])]
)
def test_shares_always_sum_to_all_merges(merges: int, first: int, weights: list[int]) -> None:
    sources = [
        {"name": f"s{i}", "kind": "text", "location": "x", "target_shards": weight * 16}
        for i, weight in enumerate(weights)
    ]
    content = {"sources": sources, "vocabulary": {"merges": merges, "first_source_merges": first}}
    configuration = PopulationConfiguration.model_validate(content)
    shares = merge_shares(targets_of(configuration.active()), configuration.vocabulary)
    assert sum(shares.values()) == merges
    assert min(shares.values()) >= 0
