"""The state of a stage: checkpoints on disk, transfer between nodes, copies, and export. Pickle is never read."""
