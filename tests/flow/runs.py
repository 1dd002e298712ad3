"""Short runs on a hand-made plan, which save the seconds that planning takes."""

import shutil

from rich.console import Console
from safetensors.torch import load_file

from anysize.geometry import Canvas, NetGeometry
from anysize.planning.canvases import Plan, write_plan
from anysize.training.events import read_events
from anysize.training.run import train

QUIET = Console(quiet=True)
SMALL, LARGE = Canvas(1, 100, 104), Canvas(2, 100, 104)


def write_small_plan(workspace):
    """A plan of two canvases, on which a step has two images on one or on both."""
    path = workspace / "plan.json"
    if not path.exists():
        plan = Plan(
            geometry=NetGeometry(16),
            images_per_step=2,
            max_pixels_per_step=LARGE.pixels,
            canvases=(SMALL, LARGE),
        )
        write_plan(plan, path, sizes=[])


def run(workspace, *overrides, console=QUIET, **options):
    """Trains for two epochs of 6 steps."""
    write_small_plan(workspace)
    settings = ("plan.file=plan.json", "plan.images_per_step=2", "train.epochs=2")
    return train(workspace / "run.toml", (*settings, *overrides), console=console, **options)


def said(workspace, *overrides, **options):
    """What a run prints; also if it fails with an error of `options["raises"]`."""
    # So wide that no path of a test is broken in two.
    console = Console(record=True, width=1000, file=(workspace / "console.txt").open("w"))
    with console.file:
        run(workspace, *overrides, console=console, **options)
    return " ".join(console.export_text().split())


def last_checkpoint(folder):
    """Net and optimiser, by name."""
    return load_file(max((folder / "checkpoints").glob("step-*")))


def events_of(folder, kind):
    """The events of a kind."""
    return [e for e in read_events(folder / "events.jsonl") if e["event"] == kind]


def copy(folder, to):
    """A run folder as a kill at this instant would leave it."""
    return shutil.copytree(folder, to)


def move(workspace, to):
    """A copy of a workspace, whose run believes that it began there."""
    copy(workspace, to)
    settings = to / "run/run.toml"
    settings.write_text(settings.read_text().replace(str(workspace), str(to)))
    return to


def results(folder):
    """All that a finished run leaves, without times."""
    keys = ("step", "miou", "iou", "best")
    return {
        **{f"weights/{n}": t for n, t in load_file(folder / "weights.safetensors").items()},
        **{f"state/{n}": t for n, t in last_checkpoint(folder).items()},
        "metrics": (folder / "metrics.json").read_text(),
        "evaluations": [{k: e[k] for k in keys} for e in events_of(folder, "evaluate")],
    }


def assert_same_results(folder, other):
    """Bit for bit."""
    a, b = results(folder), results(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        same = value.equal(b[name]) if "/" in name else value == b[name]
        assert same, name
