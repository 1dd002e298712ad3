"""How often `anysize check` sees that a mask lies turned against its image, and how often wrongly.

Crops of NASA's Blue Marble with a mask of sea, land and lakes (the demo's data) stand for square
photographs with each EXIF orientation, once with their own mask and once with one that was made of
the stored pixels.

    python scripts/check_rotation.py --crops 1000
"""

from __future__ import annotations

import argparse

import numpy as np

from anysize.check.turned import CLEAR, SUSPECTED, Agreement, compare_edges, says
from anysize.demo import read_world
from anysize.images.opening import stand_upright

INVERSE = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}
MOST_OF_ONE_CLASS = 0.98


def main() -> None:
    """Prints the two rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crops", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    world = read_world()
    rng = np.random.default_rng(parsed.seed)
    right: list[Agreement | None] = []
    wrong: list[Agreement | None] = []
    while len(right) < 7 * parsed.crops:
        side = int(rng.integers(120, 500))
        top, left = int(rng.integers(400, 4200 - side)), int(rng.integers(0, 10800 - side))
        window = slice(top, top + side), slice(left, left + side)
        image, labels = world.image[window], np.ascontiguousarray(world.mask[window])
        if np.bincount(labels.ravel()).max() > MOST_OF_ONE_CLASS * labels.size:
            continue
        for orientation, inverse in INVERSE.items():
            right.append(compare_edges(image, labels, stand_upright(labels, orientation)))
            wrong.append(compare_edges(image, stand_upright(labels, inverse), labels))
    print(f"{parsed.crops} crops x 7 orientations, seed {parsed.seed}; share of masks called")
    for name, threshold in (("turned (fault)", CLEAR), ("suspect (warning or fault)", SUSPECTED)):
        false, true = (
            sum(says(a, threshold) for a in found) / len(found) for found in (right, wrong)
        )
        print(f"  {name}: {true:.1%} of the turned ones, {false:.2%} of the right ones")


if __name__ == "__main__":
    main()
