"""Training of one stage: the compute thread, inner and outer steps, evaluation, the verdict on learning, generation."""
