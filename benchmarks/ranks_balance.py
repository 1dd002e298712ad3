"""How evenly the images of a step are dealt among ranks, by the planner's own cost; no net is run.

    python benchmarks/ranks_balance.py

An epoch of images of 200 sizes. For each number of ranks: the work of a rank over the median of
its step, p90 over all ranks and steps; and what of the ranks' time is work, if every step (with
trained norms, every pass) takes as long as its busiest rank. Exits with 1 where a p90 is above
1.10 with two images a rank and frozen norms, or with four and trained ones.
"""

from __future__ import annotations

import statistics
import sys

import numpy as np

from anysize.geometry import NetGeometry, Size
from anysize.planning.canvases import plan_canvases
from anysize.planning.dealing import deal, deal_in_lockstep
from anysize.planning.packing import Step, cost_of, pack

NUM_SIZES, IMAGES_A_SIZE = 200, 4
MOST = 1.10


def main() -> int:
    geometry = NetGeometry(16)
    rng = np.random.default_rng(0)
    distinct = [Size(*map(int, rng.integers(120, 500, 2))) for _ in range(NUM_SIZES)]
    sizes = distinct * IMAGES_A_SIZE
    worst = 0.0
    print(f"{len(sizes)} images of {len(set(sizes))} sizes, 120 to 499 pixels\n")
    print("images  ranks  norms     p90 to median  mean to busiest  computed   canvases")
    for per_step in (8, 16, 32):
        plan = plan_canvases(
            sizes,
            geometry=geometry,
            images_per_step=per_step,
            max_pixels_per_step=1_048_576,
            max_canvases=16,
        )
        steps = pack(sizes, rng.permutation(len(sizes)).tolist(), plan)
        alone = sum(cost_of(s.passes) for s in steps)
        for num_ranks in (2, 3, 4, 8):
            for norms, dealing in (("frozen", deal), ("trained", deal_in_lockstep)):
                dealt = [dealing(s, num_ranks, geometry) for s in steps]
                p90, busy = spread(dealt, by_pass=norms == "trained")
                work = sum(cost_of(s.passes) for step in dealt for s in step)
                canvases = {p.layout.canvas for step in dealt for s in step for p in s.passes}
                print(
                    f"{per_step:>6}  {num_ranks:>5}  {norms:<8}  {p90:>13.3f}  {busy:>15.1%}  "
                    f"{work / alone:>8.3f}  {len(canvases):>9}"
                )
                if per_step >= (2 if norms == "frozen" else 4) * num_ranks:
                    worst = max(worst, p90)
    print(f"\nworst p90 with enough images a rank: {worst:.3f}, at most {MOST}")
    return int(worst > MOST)


def spread(dealt: list[list[Step]], *, by_pass: bool) -> tuple[float, float]:
    """The p90 of work over the step's median, and mean work over that of the busiest rank."""
    ratios: list[float] = []
    total = busiest = 0.0
    for step in dealt:
        work = [cost_of(s.passes) for s in step]
        median = statistics.median(work)
        ratios += [w / median for w in work]
        total += statistics.fmean(work)
        if by_pass:
            passes = zip(*(s.passes for s in step), strict=True)
            busiest += sum(max(cost_of([p]) for p in parts) for parts in passes)
        else:
            busiest += max(work)
    return float(np.quantile(ratios, 0.9)), total / busiest


if __name__ == "__main__":
    sys.exit(main())
