"""The state of a stage: checkpoints on the disk, transfer between nodes, copies, and export. No pickle is ever read."""
