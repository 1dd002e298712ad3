"""The plan file: JSON that a person can read and edit, checked when it is read."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anysize.atomic_files import write_atomic
from anysize.config import read_geometry
from anysize.errors import ConfigError, ShapeError
from anysize.geometry import Canvas, NetGeometry, Size, round_up
from anysize.planning.packing import Plan, check_fit, pack
from anysize.tables import Count, from_table
from anysize.wording import count_of

FORMAT = "anysize-plan-1"
SUMMARY_ORDERS = 2
"""Epochs whose packings the stated waste is the mean of."""

SUMMARY_IMAGES = 4_000
"""Most images that a summary packs; of more, it takes an evenly spread part."""


def plan_summary(plan: Plan, sizes: Sequence[Size]) -> dict[str, Any]:
    """The figures of a plan on these images.

    Returns:
        `images`, `distinct_sizes`, `canvases`; `waste`: the part of the computed pixels that
        belongs to no image, over some packings in random orders; `passes_per_step`; and
        `canvas_shares`: for each canvas, in the order of the plan, its part of all passes.

    Raises:
        ShapeError: Some images fit on no canvas.
    """
    part = list(sizes[:: -(-len(sizes) // SUMMARY_IMAGES)]) if sizes else []
    valid = computed = num_steps = 0
    visits: Counter[Canvas] = Counter()
    for seed in range(SUMMARY_ORDERS):
        order = np.random.default_rng(seed).permutation(len(part)).tolist()
        for step in pack(part, order, plan):
            num_steps += 1
            for p in step.passes:
                visits[p.layout.canvas] += 1
                valid += p.layout.valid_pixels
                computed += p.layout.canvas.pixels
    num_passes = visits.total()
    return {
        "images": len(sizes),
        "distinct_sizes": len(set(sizes)),
        "canvases": len(plan.canvases),
        "waste": round(1 - valid / computed, 4) if computed else 0.0,
        "passes_per_step": round(num_passes / num_steps, 3) if num_steps else 0.0,
        "canvas_shares": [round(visits[c] / max(num_passes, 1), 3) for c in plan.canvases],
    }


def describe_plan(plan: Plan, sizes: Sequence[Size]) -> str:
    """The summary in words, a few lines."""
    summary = plan_summary(plan, sizes)
    lines = [
        f"{count_of(summary['images'], 'image')} of {count_of(summary['distinct_sizes'], 'size')}"
        f" -> {count_of(summary['canvases'], 'canvas', 'canvases')}, {100 * summary['waste']:.1f}% "
        "waste, "
        f"{summary['passes_per_step']:.2f} passes a step of {plan.images_per_step}",
    ]
    for canvas, share in zip(plan.canvases, summary["canvas_shares"], strict=True):
        slots = "1 slot " if canvas.slots == 1 else f"{canvas.slots} slots"
        lines.append(
            f"  {slots} of {canvas.height:>4} x {canvas.width:>4}  "
            f"{canvas.pixels / 1e6:5.2f} MP  {100 * share:5.1f}% of the passes"
        )
    return "\n".join(lines)


def check_plan(plan: Plan, sizes: Sequence[Size], *, geometry: NetGeometry, source: str) -> None:
    """Checks that a plan suits a net and holds all images.

    Args:
        plan: The plan.
        sizes: Of images that must fit, each alone.
        geometry: Of the net that is to run.
        source: The plan's file, for messages.

    Raises:
        ConfigError: The plan was made for a net with another geometry.
        ShapeError: Some images fit on no canvas.
    """
    for key, planned in dataclasses.asdict(plan.geometry).items():
        wanted = getattr(geometry, key)
        if planned != wanted:
            raise ConfigError(
                f"The plan was made for a net with `{key}` = {planned}, but this net has {wanted} "
                f"({source}). Make a new plan with `anysize plan`, or leave `plan.file` out."
            )
    try:
        check_fit(sizes, plan)
    except ShapeError as error:
        raise ShapeError(f"{source}: {error}") from None


def write_plan(plan: Plan, path: Path, *, sizes: Sequence[Size]) -> None:
    """Writes a plan with its figures on these images.

    Raises:
        ConfigError: The file cannot be written.
        ShapeError: Some images fit on no canvas.
    """
    canvases = ",\n".join(f"    {json.dumps(c._asdict())}" for c in plan.canvases)
    text = (
        "{\n"
        f'  "format": {json.dumps(FORMAT)},\n'
        f'  "geometry": {json.dumps(plan.geometry.to_table())},\n'
        f'  "images_per_step": {plan.images_per_step},\n'
        f'  "max_pixels_per_step": {plan.max_pixels_per_step},\n'
        f'  "canvases": [\n{canvases}\n  ],\n'
        f'  "summary": {json.dumps(plan_summary(plan, sizes))}\n'
        "}\n"
    )
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"The plan cannot be written to {path}: {error.strerror or error}. "
            f"Choose a folder that exists and can be written."
        ) from None


def read_plan(path: Path) -> Plan:
    """Reads a plan file and checks every value in it.

    Raises:
        ConfigError: No such file, not JSON, or a key that is missing, unknown or out of range.
    """
    try:
        table: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"No such plan: {path}. Make one with `anysize plan`.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON: {error}. Mend it, or make a new one with "
            f"`anysize plan`."
        ) from None
    source = str(path)
    found = from_table(_PlanTable, table, source)
    if found.format != FORMAT:
        raise ConfigError(
            f"`format` is {found.format!r}; this version reads {FORMAT!r} ({source}). Make a "
            f"new plan with `anysize plan`."
        )
    geometry = read_geometry(found.geometry, source)
    _check_canvases(found, geometry.canvas_multiple, source)
    return Plan(
        geometry=geometry,
        images_per_step=found.images_per_step,
        max_pixels_per_step=found.max_pixels_per_step,
        canvases=found.canvases,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanTable:
    format: str
    geometry: object
    images_per_step: Count
    max_pixels_per_step: Count
    canvases: tuple[Canvas, ...]
    summary: object = None


def _check_canvases(found: _PlanTable, multiple: int, source: str) -> None:
    if not found.canvases:
        raise ConfigError(f"`canvases` must be a list with at least one canvas ({source}).")
    for i, canvas in enumerate(found.canvases):
        key = f"canvases[{i}]"
        for name in ("height", "width"):
            extent = getattr(canvas, name)
            if extent % multiple:
                raise ConfigError(
                    f"`{key}.{name}` is {extent}, which is not a multiple of {multiple} "
                    f"({source}). Use {round_up(extent, multiple)}."
                )
        if canvas.pixels > found.max_pixels_per_step:
            raise ConfigError(
                f"`{key}` is {canvas}, {canvas.pixels} pixels, above `max_pixels_per_step` = "
                f"{found.max_pixels_per_step} ({source}). Make the canvas smaller, or raise the "
                "limit."
            )
        first = found.canvases.index(canvas)
        if first < i:
            raise ConfigError(
                f"`{key}` is {canvas}, as is `canvases[{first}]` ({source}). Remove one."
            )
