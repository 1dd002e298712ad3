"""One HTML page of a verdict on a script, with its step times coloured by shape visit.

Needs no other file, no network and no PyTorch.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anysize_why.counts import Count, counts
from anysize_why.findings import Verdict
from anysize_why.record import STAGES
from anysize_why.why import Watched, describe

__all__ = ["page"]

FIRST, AGAIN, UNKNOWN = "#D55E00", "#0072B2", "#999999"
"""Of Okabe and Ito, whom people with any kind of colour vision tell apart."""

STAGE_COLOURS = (
    "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#E69F00",
    "#F0E442", "#000000", "#7F7F7F", "#8A3C00", "#004D33", "#BBBBBB",
)  # fmt: skip


def page(watched: Watched, found: Verdict) -> str:
    """The page.

    Args:
        watched: What became of the script.
        found: What is said about it.
    """
    steps = watched.record.steps
    title = f"Why is {html.escape(watched.script.name)} slow?"
    if found.healthy:
        title = f"{html.escape(watched.script.name)} is healthy"
    sections = [f"<h1>{title}</h1>"]
    for number, finding in enumerate(found.findings, 1):
        cost = f"{finding.cost_s:.2f} s of {found.wall_s:.2f} s" if finding.cost_s else "no time"
        rows = (
            ("measured", finding.evidence), ("change", finding.change), ("gain", finding.gain)
        )  # fmt: skip
        said = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in rows)
        sections.append(f"<h2>{number}. {html.escape(finding.cause)}: {cost}</h2><dl>{said}</dl>")
    for name, figure in (
        ("Step time, by visit of the input's shape", _draw_steps(steps)),
        ("Where each step's time went", _draw_stages(steps)),
    ):
        picture = base64.b64encode(_png(figure)).decode()
        sections.append(f'<h2>{name}</h2><img alt="{name}" src="data:image/png;base64,{picture}">')
    sections.append(f"<h2>Counted, a step</h2>{_table(counts(watched.record))}")
    said = html.escape(describe(watched, found))
    sections.append(f"<h2>All that was measured</h2><pre>{said}</pre>")
    return _PAGE.replace("TITLE", title).replace("BODY", "\n".join(sections))


def _table(rows: Sequence[Count]) -> str:
    """What was counted, a line each; a dash for what does not apply."""

    def cell(value: float | None, scale: float, digits: int) -> str:
        return "<td>-</td>" if value is None else f"<td>{scale * value:.{digits}f}</td>"

    lines = [
        f"<tr><th>{html.escape(row.name)}</th>{cell(row.calls, 1, 2)}{cell(row.num_bytes, 1e-6, 3)}"
        f"{cell(row.seconds, 1000, 2)}<td class='how'>{html.escape(row.measured)}</td></tr>"
        for row in rows
    ]
    head = "<tr><th></th><th>times</th><th>MB</th><th>ms</th><th class='how'>measured by</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def _draw_steps(steps: Sequence[Any]) -> Figure:
    figure, axes = _figure()
    seen: set[tuple[int, ...]] = set()
    dots: dict[str, list[tuple[int, float]]] = {"first visit": [], "seen before": [], "unknown": []}
    for number, step in enumerate(steps, 2):
        shape = tuple(step["shape"] or ())
        kind = "unknown" if not shape else "seen before" if shape in seen else "first visit"
        seen.add(shape)
        dots[kind].append((number, 1000 * step["wall_s"]))
    colours = (FIRST, AGAIN, UNKNOWN)
    for (kind, places), colour in zip(dots.items(), colours, strict=True):
        if places:
            label = f"{kind} ({len(places)})"
            axes.scatter(*zip(*places, strict=True), color=colour, s=18, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("step (ms)")
    axes.legend(frameon=False)
    return figure


def _draw_stages(steps: Sequence[Any]) -> Figure:
    figure, axes = _figure()
    places = range(2, len(steps) + 2)
    bottom = [0.0] * len(steps)
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        heights = [1000 * step["stages"].get(stage, 0.0) for step in steps]
        if sum(heights) > 0.002 * 1000 * sum(step["wall_s"] for step in steps):
            axes.bar(places, heights, 1.0, bottom, color=colour, label=stage, linewidth=0)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_ylabel("step (ms)")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("optimiser step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100% } dt { font-weight: 600 } pre { overflow-x: auto; background: #f5f5f5;
padding: 1rem }
table { border-collapse: collapse; font-size: 0.85rem } th { text-align: left; font-weight: 600 }
td { text-align: right } th, td { padding: 0 0.8rem 0 0 } .how { text-align: left }
</style></head><body>
BODY
</body></html>
"""
