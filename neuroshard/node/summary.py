"""What a demo with a fixed number of steps prints at its end."""

from __future__ import annotations

from neuroshard.status.snapshot import NodeStatus


def summary(status: NodeStatus) -> str:
    """The run in a few lines, for people."""
    training, checkpoints = status.training, status.checkpoints
    rows = [("steps", f"{training.steps:,}"), ("tokens", f"{training.tokens:,}")]
    if training.loss_ema is not None:
        rows.append(("training loss", f"{training.loss_ema:.3f} nats a token"))
    if training.held_out:
        first, last = training.held_out[0], training.held_out[-1]
        later = "" if last is first else f", {last.loss:.3f} at step {last.step}"
        rows.append(("held-out loss", f"{first.loss:.3f} at step {first.step}{later}"))
    rows.append(("verdict", status.verification.reason))
    if checkpoints.last_saved_step is not None:
        rows.append(("checkpoint", f"step {checkpoints.last_saved_step:,} in {checkpoints.folder}"))
    return "".join(f"{name:14} {value}\n" for name, value in rows)
