"""Show the dashboard of a fake node: `python tests/browser/show.py training`, then open the address that it prints.

The fake node takes commands and, while it trains, makes a step per second. Vite's development server forwards its
requests to the default port.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import snapshots
import swarm_snapshots

from neuroshard.api.access import FRAGMENT, SessionKeys
from neuroshard.status.snapshot import NodeState, NodeStatus
from tests.worlds.api import SECRET, ServedNode

KEY_SECONDS = 86_400

SCENARIOS: dict[str, Callable[[], NodeStatus]] = {
    "starting": snapshots.starting,
    "training": snapshots.with_a_past,
    "waiting": snapshots.waiting_for_data,
    "trouble": snapshots.in_trouble,
    "swarm": lambda: swarm_snapshots.among(12),
    "crowd": lambda: swarm_snapshots.among(1_000),
    "pipeline": swarm_snapshots.driver,
    "gap": swarm_snapshots.gap,
    "trainer": swarm_snapshots.trainer,
    "rounds": swarm_snapshots.eventful,
    "voters": swarm_snapshots.voting,
}


def main() -> None:
    """Serve one scenario until Ctrl+C."""
    parser = argparse.ArgumentParser(description="Show the dashboard of a fake node.")
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    node = ServedNode(SCENARIOS[options.scenario](), options.port)
    node.start()
    key = SessionKeys(SECRET, node.port).new_entry_key(time.time(), KEY_SECONDS)
    sys.stdout.write(f"{node.url}#{FRAGMENT}{key}\n")
    sys.stdout.flush()
    try:
        while True:
            time.sleep(1)
            status = node.board.current()
            if status.state is NodeState.TRAINING:
                node.take_step(6 * math.exp(-status.training.steps / 400) + 1.5)
    except KeyboardInterrupt:
        node.stop()


if __name__ == "__main__":
    main()
