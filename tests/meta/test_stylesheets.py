"""A class is laid out in one stylesheet: a second one that takes the name for itself changes views it never meant."""

from __future__ import annotations

import re
from collections import defaultdict

from source_files import web_files

CLASS_ALONE = re.compile(r"^\s*\.([a-z0-9-]+)\s*\{", re.MULTILINE)


def test_no_class_is_laid_out_in_two_stylesheets() -> None:
    places = defaultdict[str, set[str]](set)
    for path in web_files():
        if path.suffix == ".css":
            for name in CLASS_ALONE.findall(path.read_text(encoding="utf-8")):
                places[name].add(path.name)
    assert len(places) > 100
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
