"""Choosing canvases, and packing images onto them."""
