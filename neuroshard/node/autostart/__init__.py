"""Starting with the computer: only ever switched on by the owner, and removed without a trace. No secret is written."""

from neuroshard.node.autostart.places import Place, places_here, places_of_this_computer
from neuroshard.node.autostart.switching import AutostartStatus, start_command, status, turn_off, turn_on

__all__ = [
    "AutostartStatus",
    "Place",
    "places_here",
    "places_of_this_computer",
    "start_command",
    "status",
    "turn_off",
    "turn_on",
]
