"""Inner AdamW with its schedule, and DiLoCo's outer step: pure functions on tensors."""
