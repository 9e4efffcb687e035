"""A module that calls itself pure is under the import contract of pure modules, and no other."""

from __future__ import annotations

import ast
import re
import tomllib

from source_files import ROOT, python_files

CONTRACT = "Pure modules"


def test_the_contract_lists_the_modules_that_call_themselves_pure() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = [one for one in contracts if one["name"].startswith(CONTRACT)]
    named = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in python_files("neuroshard")
        if re.search(r"\bPure\b", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    }
    covered = set(contract["source_modules"])
    packages = tuple(f"{name}." for name in covered)
    assert covered == {name for name in named if not name.startswith(packages)}
