"""Immutable snapshots of the node, the board that holds the current one, and the commands a user may send."""
