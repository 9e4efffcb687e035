"""What a snapshot of a stage holds is known without PyTorch's compiler and symbolic mathematics: they take 100 MB."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from neuroshard.training.transfer.layout import snapshot_layout
from neuroshard.types import Architecture, LayerRange

snapshot_layout(Architecture(64, 2, 2, 1, 128, 512, 32), LayerRange(0, 2))
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""


def test_the_layout_of_a_snapshot_loads_no_compiler() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
