"""ByzFL's aggregators out of a wheel or folder, without the rest of it, which wants torchvision and more."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def byzfl_aggregators(place: str) -> Any:
    """The module `byzfl.aggregators.aggregators`; `place` is a wheel or what is above the folder `byzfl`."""
    package = ModuleType("byzfl")
    package.__path__ = [str(Path(place) / "byzfl")]  # its own __init__, which imports everything, is passed by
    sys.path.insert(0, place)
    sys.modules["byzfl"] = package
    if find_spec("scipy") is None:  # only distances need it
        spatial = ModuleType("scipy.spatial")
        spatial.distance = None  # type: ignore[attr-defined]
        sys.modules |= {"scipy": ModuleType("scipy"), "scipy.spatial": spatial}
    return import_module("byzfl.aggregators.aggregators")
