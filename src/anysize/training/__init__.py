"""Training: a run, its steps, losses and state."""
