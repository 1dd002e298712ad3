"""Folders of real, tiny images."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def write_images(tmp_path):
    """Writes images of these sizes into a folder, which it gives."""

    def write(sizes):
        folder = tmp_path / "photos"
        folder.mkdir()
        rng = np.random.default_rng(0)
        for i, (height, width) in enumerate(sizes):
            pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:03}.png")
        return folder

    return write
