from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anysize.data.samples import Classes

MakeFolder = Callable[..., Path]


def write_image(path: Path, size: tuple[int, int], seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)


def write_mask(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


@pytest.fixture
def classes() -> Classes:
    return Classes(names=("sea", "land", "lake"), colours=((0, 0, 255), (0, 200, 0), (0, 255, 255)))


@pytest.fixture
def make_folder(tmp_path: Path, classes: Classes) -> MakeFolder:
    """A folder with images `s0`, `s1`, ... of the given sizes and random labels."""

    def make(sizes: Sequence[tuple[int, int]], kind: str = "multiclass") -> Path:
        root = tmp_path / "data"
        (root / "images").mkdir(parents=True)
        rng = np.random.default_rng(7)
        for i, size in enumerate(sizes):
            write_image(root / "images" / f"s{i}.png", size, seed=i)
            if kind == "multiclass":
                labels = rng.choice([0, 1, 2, 255], size)
                write_mask(root / "masks" / f"s{i}.png", labels)
            else:
                for name in classes.names:
                    labels = rng.choice([0, 1, 255], size)
                    write_mask(root / "masks" / name / f"s{i}.png", labels)
        return root

    return make
