"""Readers of labels as people have them: one file per format, each giving a `Reading`."""
