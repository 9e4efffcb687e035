"""docs/RUNS.md against the code: every name of the file of a run, its default and whether it may change."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import pytest

from neuroshard.config.run_parameters import GenesisPins
from neuroshard.runs.offer import MAY_CHANGE
from neuroshard.runs.run_file import LATER_NAMES, NAMES, TABLES, new_parameters

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = 6  # of the table of all names
DERIVED = {
    "subspace_sha256",
    "wire_precision",  # by the number of stages
    "architecture",
    "genesis",
    "sequences_per_step",
    "initial_weights_seed",
    "inner_lr",
    "trim_fraction",
    "holds_from_outer_step",
}  # fmt: skip - words, not values


def rows() -> dict[str, list[str]]:
    """Cells after the name, by name; two names may share a row."""
    found: dict[str, list[str]] = {}
    for line in (DOCS / "RUNS.md").read_text("utf-8").splitlines():
        if line.startswith("| `"):
            first, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            if len(cells) != COLUMNS - 1:  # a table of the options of a model
                continue
            names = re.findall(r"`(\w+)`", first)
            defaults = cells[1].split(", ") if len(names) > 1 else [cells[1]] * len(names)
            found |= {name: [cells[0], default, *cells[2:]] for name, default in zip(names, defaults, strict=True)}
    return found


def defaults() -> dict[str, object]:
    """Value of each name in a run whose file gives an architecture only."""
    pins = GenesisPins("ab" * 32, 16, None, "ef" * 32, 512)
    made = new_parameters({"architecture": {"depth": 4}}, pins)
    return {name: attrgetter(place)(made) for name, place in NAMES.items()}


def test_the_table_explains_every_name_and_no_other() -> None:
    assert set(rows()) == {*NAMES, *TABLES, *LATER_NAMES}


@pytest.mark.parametrize("name", sorted(NAMES.keys() - DERIVED))
def test_defaults_are_those_of_the_code(name: str) -> None:
    told = rows()[name][1].strip("`")
    value = defaults()[name]
    if value == ():
        assert told == "none"
    elif isinstance(value, bool):
        assert told == str(value).lower()
    elif isinstance(value, str):
        assert told == f'"{value}"'
    else:
        assert float(told.replace(",", "")) == value


@pytest.mark.parametrize("name", sorted({*NAMES, *TABLES}))
def test_what_may_change_is_what_the_code_lets_change(name: str) -> None:
    assert rows()[name][3:] == ["0.1", "yes" if NAMES.get(name, name) in MAY_CHANGE else "no"]


@pytest.mark.parametrize("name", sorted(LATER_NAMES))
def test_names_to_come_are_marked(name: str) -> None:
    _, default, _, *effect = rows()[name]
    today = LATER_NAMES[name].today
    assert default == ("none" if today is None else f'`"{today}"`' if isinstance(today, str) else str(today))
    assert effect == ["later", "not yet"]


def test_readme_links_the_table() -> None:
    assert "(docs/RUNS.md)" in (DOCS.parent / "README.md").read_text("utf-8")
