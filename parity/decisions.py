"""Which way a net decided at every ReLU and every pooling window. Both sides of a proof use it.

The gradient of such a net jumps where a value next to zero falls on the other side of a ReLU, or
where another cell of a pooling window is the largest. In float32 two correct nets decide otherwise
at about one in ten million values, and then differ by 1e-3 in a gradient, as each does from its own
float64. So float32 gradients are compared where both decided alike, which is counted, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def decisions(activations: Sequence[np.ndarray]) -> np.ndarray:
    """Every decision of one image, as bytes to be compared one by one.

    Args:
        activations: `[h, w, c]` after each ReLU, from the stem on; the stem is pooled 3x3/2 SAME.
    """
    active = np.concatenate([a.ravel() > 0 for a in activations])
    return np.concatenate([np.packbits(active), _largest_in_window(activations[0]).ravel()])


def _largest_in_window(stem: np.ndarray) -> np.ndarray:
    """Which of the nine cells of each pooling window is the largest, the first of equal ones."""
    extents = [-(-n // 2) for n in stem.shape[:2]]
    total = [max(2 * m + 1 - n, 0) for m, n in zip(extents, stem.shape[:2], strict=True)]
    edges = [(t // 2, t - t // 2) for t in total]
    padded = np.pad(stem, [*edges, (0, 0)], constant_values=-1.0)
    rows, columns = (slice(0, 2 * m - 1, 2) for m in extents)
    cells = [
        padded[i : i + rows.stop : 2, j : j + columns.stop : 2] for i in range(3) for j in range(3)
    ]
    return np.argmax(np.stack(cells), axis=0).astype(np.uint8)
