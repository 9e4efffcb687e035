"""What a start does, in the order in which it is shown."""

from __future__ import annotations

from neuroshard.config.settings import Settings

LOADING = "Loading PyTorch"
HARDWARE = "Measuring this computer"
DEMO_DATA = "Building the demo data"
RUN = "Finding the run"
DATA = "Opening the training data"
MODEL = "Building the model"
CHECKPOINT = "Looking for a checkpoint"
FIRST_STEP = "Making the first step"


def startup_stages(settings: Settings, *, is_demo: bool, holds_layers: bool) -> tuple[str, ...]:
    """The stages of one start. A run that was named is looked for from the first second on."""
    named = (RUN,) if settings.run else ()
    demo = (DEMO_DATA,) if is_demo else ()
    suggested = () if settings.run or is_demo else (RUN,)
    holding = (MODEL, CHECKPOINT) if holds_layers else ()
    return (*named, LOADING, HARDWARE, *demo, DATA, *suggested, *holding, FIRST_STEP)
