"""Pictures of a run, and the page that shows them; from files of the run only.

Nothing here needs the run to be over, the net or PyTorch. Figures are matplotlib objects drawn by
Agg; pyplot's global state is never touched. Colours are those of Okabe and Ito, which people with
any kind of colour vision tell apart.
"""

from __future__ import annotations

import base64
import contextlib
import html
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image

from anysize.atomic_files import write_atomic
from anysize.config import load_config
from anysize.data.samples import images_of
from anysize.errors import DataError, ShapeError
from anysize.geometry import Canvas, Size
from anysize.images.headers import fingerprint
from anysize.planning.canvases import Plan, plan_summary, read_plan
from anysize.planning.packing import check_fit
from anysize.predict.metrics import SCORES
from anysize.training.events import read_events, read_metrics
from anysize.wording import count_of, printable

COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442")
"""Okabe and Ito's, without black, which is for the mean."""

_SCORE_NAMES = {"iou": "IoU", "average_precision": "AP", "pck": "PCK@0.1 of the box"}

NUM_NAMED_CLASSES = 7
"""With more classes than this, their curves are grey and only the mean has a name."""

SMOOTHED_SHARE = 0.05
"""Share of the train events that the smooth loss curve averages over."""


def write_report(run: Path, examples: Sequence[tuple[str, bytes]] = ()) -> Path:
    """Writes `report.html` into a run folder: one page that needs no other file.

    Args:
        run: Folder of a run, over or not.
        examples: Names and PNGs of `predict.examples.draw_examples`.

    Returns:
        The page.

    Raises:
        AnysizeError: A file of the run is missing or damaged.
    """
    config = load_config(run / "run.toml")
    events = read_events(run / "events.jsonl")
    plan = read_plan(run / "plan.json")
    pictures = [("Loss and scores", _png(_draw_curves(events)))]
    try:
        sizes = fingerprint(images_of(Path(config.data.root), config.data))
    except DataError as error:
        missing = f"<p>The image sizes are not shown: {html.escape(str(error))}</p>"
    else:
        missing = ""
        pictures.append(("Image sizes and canvases", _png(_draw_sizes(sizes, plan))))

    sections = [f"<h1>Run {html.escape(run.resolve().name)}</h1>", _speed(events), missing]
    if (run / "metrics.json").is_file():
        sections.append(_scores(run))
    if examples:
        sections.append(
            "<h2>Predictions</h2><p>Evaluation images that the best net labels worst and best: as "
            "they are, with their labels, and with what the net says.</p>"
        )
    sections.extend(
        f'<figure><img alt="{html.escape(name)}" src="data:image/jpeg;base64,'
        f'{base64.b64encode(_jpeg(png)).decode()}"><figcaption>{html.escape(name)}</figcaption></figure>'
        for name, png in examples
    )
    sections.extend(
        f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,'
        f'{base64.b64encode(png).decode()}">'
        for title, png in pictures
    )
    settings = (run / "run.toml").read_text(encoding="utf-8")
    sections.append(f"<h2>Settings</h2><pre>{html.escape(settings)}</pre>")
    page = run / "report.html"
    write_atomic(page, _PAGE.replace("BODY", printable("\n".join(sections))).encode())
    return page


def loss_and_iou(events: Sequence[Mapping[str, Any]], out_png: Path) -> None:
    """Draws the training loss, and the scores of each evaluation, against the step.

    Args:
        events: Of `events.jsonl`, as `runlog.read_events` gives them.
        out_png: The picture.
    """
    write_atomic(out_png, _png(_draw_curves(events)))


def sizes_and_canvases(sizes: Sequence[Size], plan: Plan, out_png: Path) -> None:
    """Draws every image's width and height, and the slots of the planned canvases over them.

    Args:
        sizes: Of the images.
        plan: Their plan.
        out_png: The picture.
    """
    write_atomic(out_png, _png(_draw_sizes(sizes, plan)))


def _draw_curves(events: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss_axes, score_axes = figure.subplots(1, 2)
    _draw_loss(loss_axes, [e for e in events if e["event"] == "train"])
    _draw_scores(score_axes, [e for e in events if e["event"] == "evaluate"])
    last_step = max((e["step"] for e in events if "step" in e), default=1)
    for axes in (loss_axes, score_axes):
        axes.set_xlabel("step")
        axes.set_xlim(0, last_step * 1.02)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_loss(axes: Axes, events: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title("Training loss")
    axes.set_ylabel("loss")
    if not events:
        _say_nothing_yet(axes, "no step logged yet")
        return
    steps = [e["step"] for e in events]
    losses = [e["loss"] for e in events]
    window = max(1, round(SMOOTHED_SHARE * len(losses)))
    if window == 1:
        axes.plot(steps, losses, color=COLOURS[0], marker="o" if len(steps) == 1 else None)
        return
    smooth = [
        sum(losses[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(losses))
    ]
    axes.plot(steps, losses, color=COLOURS[4], linewidth=0.8, label="as logged")
    axes.plot(steps, smooth, color=COLOURS[0], linewidth=2, label=f"mean of the last {window}")
    axes.legend(frameon=False)


def _draw_scores(axes: Axes, events: Sequence[Mapping[str, Any]]) -> None:
    by_class, mean = SCORES[events[0]["kind"] if events else "multiclass"]
    name = _SCORE_NAMES[by_class]
    axes.set_title(f"{name} on the evaluation images")
    axes.set_ylabel(f"{name} (%)")
    axes.set_ylim(0, 100)
    if not events:
        _say_nothing_yet(axes, "no evaluation yet")
        return
    steps = [e["step"] for e in events]
    classes = list(events[0][by_class])
    named = len(classes) <= NUM_NAMED_CLASSES
    for i, label in enumerate(classes):
        axes.plot(
            steps,
            [_percent(e[by_class][label]) for e in events],
            color=COLOURS[i] if named else "#999999",
            linewidth=1.5 if named else 0.5,
            marker="o",
            markersize=4 if named else 1,
            label=_as_written(label) if named else f"{len(classes)} classes" if i == 0 else None,
        )
    axes.plot(
        steps,
        [_percent(e[mean]) for e in events],
        color="black",
        linewidth=2.5,
        linestyle="--",
        marker="s",
        markersize=4,
        label="mean",
    )
    axes.figure.legend(
        handles=axes.get_legend_handles_labels()[0], loc="outside right upper", frameon=False
    )


def _as_written(name: str) -> str:
    """A name as matplotlib shows it: dollars are no mathematics, and `_` hides nothing."""
    return f"\u200b{printable(name)}".replace("$", r"\$")


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value


def _say_nothing_yet(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#555555")


def _draw_sizes(sizes: Sequence[Size], plan: Plan) -> Figure:
    counts = Counter(sizes)
    canvases = sorted(_most_used(plan, sizes), key=lambda c: (c.height * c.width, c))
    figure = Figure(figsize=(10.5, 7), layout="constrained")
    axes = figure.subplots()
    axes.scatter(
        [s.width for s in counts],
        [s.height for s in counts],
        s=[16 * math.sqrt(n) for n in counts.values()],
        color=COLOURS[0],
        alpha=0.5,
        linewidths=0,
        zorder=2,
    )
    extents = [max(s.height, s.width) for s in (*counts, *plan.canvases)]
    extent = 1.04 * max([1, *extents])
    others = [c for c in plan.canvases if c not in canvases]
    for c in others:
        axes.add_patch(
            Rectangle((0, 0), c.width, c.height, fill=False, edgecolor="#D55E00", lw=0.6, alpha=0.2)
        )
    entries = [Line2D([], [], linestyle="", marker="o", color=COLOURS[0], label="an image's size")]
    taken: list[tuple[float, float]] = []
    for i, canvas in enumerate(canvases):
        letter = _letter(i)
        axes.add_patch(
            Rectangle((0, 0), canvas.width, canvas.height, fill=False, edgecolor="#D55E00", lw=1.2)
        )
        x, y = _free_spot(canvas.width, canvas.height, taken, 0.032 * extent)
        taken.append((x, y))
        axes.text(
            x,
            y,
            letter,
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold",
            color="#8A3C00",
            bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white", "edgecolor": "#D55E00"},
            zorder=4,
        )
        slots = f"{count_of(canvas.slots, 'slot')} of"
        entries.append(
            Line2D([], [], linestyle="", label=f"{letter}: {slots} {canvas.height}x{canvas.width}")
        )
    axes.set_xlim(0, extent)
    axes.set_ylim(0, extent)
    axes.set_aspect("equal")
    axes.set_xlabel("width (pixels)")
    axes.set_ylabel("height (pixels)")
    axes.set_title(
        f"{count_of(len(sizes), 'image')} of {count_of(len(counts), 'size')} on "
        f"{count_of(len(plan.canvases), 'canvas', 'canvases')}"
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if others:
        entries.append(
            Line2D([], [], color="#D55E00", lw=0.6, alpha=0.4, label=f"and {len(others)} used less")
        )
    figure.legend(
        handles=entries,
        title="Canvases, slots x height x width;\na slot holds one or several images",
        loc="outside right upper",
        frameon=False,
        alignment="left",
        handlelength=1,
    )
    return figure


MOST_NAMED = 10
"""Canvases with a letter in the picture of sizes; the others are light lines."""


def _most_used(plan: Plan, sizes: Sequence[Size]) -> list[Canvas]:
    """The canvases with the largest shares of the passes; images that fit none have no say."""
    if len(plan.canvases) <= MOST_NAMED:
        return list(plan.canvases)
    fitting: list[Size] = []
    for size in sizes:
        with contextlib.suppress(ShapeError):
            check_fit([size], plan)
            fitting.append(size)
    shares = plan_summary(plan, fitting)["canvas_shares"]
    by_use = sorted(zip(shares, plan.canvases, strict=True), key=lambda pair: -pair[0])
    return [canvas for _, canvas in by_use[:MOST_NAMED]]


def _letter(index: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    first, second = divmod(index, 26)
    return (chr(ord("A") + first - 1) if first else "") + chr(ord("A") + second)


def _free_spot(
    width: float, height: float, taken: Sequence[tuple[float, float]], distance: float
) -> tuple[float, float]:
    """A point on a rectangle's upper or right edge, near their corner, away from those taken."""
    along_top = [(width - i * distance, height) for i in range(int(width / distance))]
    along_right = [(width, height - i * distance) for i in range(1, int(height / distance))]
    spots = sorted([(width, height), *along_top, *along_right], key=lambda s: -s[0] - s[1])
    for x, y in spots:
        if all(math.hypot(x - u, y - v) >= distance for u, v in taken):
            return x, y
    return width, height


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _jpeg(png: bytes) -> bytes:
    """A photograph in a tenth of the bytes, so that a page with twenty of them opens at once."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def _speed(events: Sequence[Mapping[str, Any]]) -> str:
    trained = [e for e in events if e["event"] == "train"]
    if not trained:
        return "<p>No step is logged yet.</p>"
    seconds = sum(e["elapsed_s"] for e in trained)
    megapixels = sum(e["valid_megapixels_per_s"] * e["elapsed_s"] for e in trained)
    waited = sum(e["wait_s"] for e in trained)
    first_visits = [e["first_visit_s"] for e in events if e["event"] == "canvas"]
    return (
        f"<p>{count_of(trained[-1]['step'], 'step')} in {seconds:,.0f} s of training: "
        f"{megapixels / seconds:.3f} valid megapixels a second, "
        f"{waited / seconds:.1%} of the time waiting for data. "
        f"{count_of(len(first_visits), 'canvas', 'canvases')}; first visits took "
        f"{sum(first_visits):.1f} s.</p>"
        + "".join(
            f"<p>Stopped early after step {e['step']}: no score better than "
            f"{html.escape(str(e.get('best_score')))}, "
            f"after epoch {html.escape(str(e.get('best_epoch')))}.</p>"
            for e in events
            if e["event"] == "early_stop" and e["step"] >= trained[-1]["step"]
        )
    )


def _scores(run: Path) -> str:
    result = read_metrics(run)
    try:
        confusion = None if result is None else _confusion(result)
    except (ValueError, LookupError, TypeError, AttributeError):
        confusion = None
    if result is None or confusion is None:
        raise DataError(
            f"{run / 'metrics.json'} is damaged or has no metrics of a run. Put it back, or "
            "remove it: the report then has no table of scores."
        )
    by_class, mean = SCORES[result["kind"]]
    rows = [*result[by_class].items(), ("mean", result[mean])]
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{_cell(value)}</td></tr>" for name, value in rows
    )
    title = f"{_SCORE_NAMES[by_class]} (%)"
    return (
        f"<h2>Best evaluation, after step {result['step']}</h2>"
        f"<table><tr><th>class</th><th>{title}</th></tr>{cells}</table>{confusion}"
    )


MOST_CONFUSED = 40
"""Classes of a confusion matrix that still fits on the page."""


def _confusion(result: Mapping[str, Any]) -> str:
    """The confusion matrix, or the counts of each class on its own; in percent of the truth."""
    if "at_half" in result:
        head = ("class", "found", "missed", "false, of all called")
        rows = [
            (name, _ratio(tp, tp + fn), _ratio(fn, tp + fn), _ratio(fp, tp + fp))
            for name, (tp, fp, fn) in result["at_half"].items()
        ]
    else:
        names = list(result[SCORES[result["kind"]][0]])
        if "confusion" not in result or len(names) > MOST_CONFUSED:
            return ""
        head = ("true class, called", *names)
        rows = [
            (name, *(_ratio(n, sum(counts)) for n in counts))
            for name, counts in zip(names, result["confusion"], strict=True)
        ]
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(
            f'<td style="background: rgba(230, 159, 0, {share or 0:.2f})">{_cell(share)}</td>'
            for share in shares
        )
        + "</tr>"
        for name, *shares in rows
    )
    return (
        "<h2>Confusion, in percent of the pixels of each true class</h2>"
        f"<table><tr>{titles}</tr>{body}</table>"
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Anysize run</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em }
img { max-width: 100% }
td, th { padding: 0.2em 1.5em 0.2em 0; text-align: left }
td + td, th + th { text-align: right }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto }
</style>
BODY
</html>
"""
