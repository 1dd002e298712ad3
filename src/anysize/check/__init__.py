"""Faults of a data folder, found before training."""
