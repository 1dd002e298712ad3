"""Anysize: pixel labelling on images of any size, at native resolution, on exact canvases."""

__version__ = "0.1.0"
