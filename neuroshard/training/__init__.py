"""Training: the step loop, evaluation, the training record, checkpoints of a stage, and text from the model."""
