"""A node that leads its session leaves the processor to other sessions. A node in a terminal changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neuroshard.node.process import SESSION_NICENESS

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = f"""
from pathlib import Path
from neuroshard.node.process import lower_session_share
lower_session_share()
print(Path({str(AUTOGROUP)!r}).read_text())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not divide a processor between sessions")
@pytest.mark.parametrize("is_leader", [True, False])
def test_only_the_leader_of_a_session_lowers_its_share(is_leader: bool) -> None:
    before = AUTOGROUP.read_text()
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=is_leader).stdout
    assert said.split()[1:] == ["nice", str(SESSION_NICENESS)] if is_leader else said.split() == before.split()
    assert AUTOGROUP.read_text() == before
