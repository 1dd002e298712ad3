"""The question as a picture: step time against step number. Colours are Okabe and Ito's."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

PANELS = (
    ("plain, one size", "#0072B2"),
    ("plain, ten sizes", "#009E73"),
    ("plain, all sizes", "#D55E00"),
    ("mosaic, all sizes", "#CC79A7"),
)


def step_times_png(result: Mapping[str, Any]) -> bytes:
    """Draws seconds per valid megapixel of each step, first visits apart from repeats.

    Args:
        result: As `run_bench` gives it.
    """
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = list(figure.subplots(2, 2, sharey=True).flat)
    for axes, (name, colour) in zip(panels, PANELS, strict=True):
        steps = [s for s in result["steps"] if s["arm"] == name]
        times = [1e6 * s["seconds"] / s["valid_pixels"] for s in steps]
        axes.plot(range(1, len(steps) + 1), times, color=colour, linewidth=1, alpha=0.5)
        for is_first, marker, label in ((True, "^", "first visit"), (False, "o", "repeat")):
            found = [i for i, s in enumerate(steps) if s["first_visit"] == is_first]
            axes.plot(
                [i + 1 for i in found],
                [times[i] for i in found],
                linestyle="",
                marker=marker,
                markersize=6 if is_first else 4,
                color=colour,
                markerfacecolor=colour if is_first else "white",
                label=label,
            )
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.set_ylabel("s per valid megapixel")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.suptitle(_title(result))
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _title(result: Mapping[str, Any]) -> str:
    net, machine = result["net"], result["machine"]
    name = f"units {net['units']}" if net["units"] else f"ResNet-{net['depth']}"
    where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    return (
        f"{name}, output stride {net['output_stride']}, {net['precision']}, "
        f"{result['images_per_step']} images a step, {where}"
    )
