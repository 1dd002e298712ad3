"""The order of an epoch: which images make which step, on which canvases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anysize.geometry import Size
from anysize.planning.canvases import Plan
from anysize.planning.packing import Step, pack


def epoch_steps(plan: Plan, sizes: Sequence[Size], *, seed: int, epoch: int) -> list[Step]:
    """Shuffles the images, packs them into steps and shuffles the steps.

    A pure function of its arguments, so that a resumed run finds its place by the step's number.
    Each image is in exactly one step. The steps are shuffled as well since packing may put images
    of one shape together; a last step with fewer images stays last.

    Args:
        plan: The canvases.
        sizes: Of the training images as they are drawn for this epoch.
        seed: Of the run.
        epoch: From 0.
    """
    rng = np.random.default_rng((seed, epoch))
    steps = pack(sizes, rng.permutation(len(sizes)).tolist(), plan)
    full = [step for step in steps if step.num_images == plan.images_per_step]
    ragged = [step for step in steps if step.num_images != plan.images_per_step]
    return [full[i] for i in rng.permutation(len(full))] + ragged
