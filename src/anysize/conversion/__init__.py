"""Weights of other systems, brought into ours: a reader and a table of names for each system."""
