"""All that is fuzzed. A reader of another room joins by one more `Target` in one of the modules."""

from __future__ import annotations

from importlib import import_module

from tests.fuzz.target import MODULES, Target

TARGETS: tuple[Target, ...] = tuple(target for module in MODULES for target in import_module(module).TARGETS)
