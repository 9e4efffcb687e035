"""Inner optimizers with their schedule, and DiLoCo's outer step: pure functions on tensors."""
