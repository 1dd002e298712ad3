"""Causes within the net: sizes, the compiler, layout, precision, threads, batches. Pure."""

from __future__ import annotations

from collections import Counter

from anysize_why.findings import Finding
from anysize_why.record import (
    Found,
    Record,
    compare,
    control_of,
    counted,
    first_visits,
    ms,
    tried,
)

__all__ = [
    "find_batch",
    "find_channels_last",
    "find_compiling",
    "find_float64",
    "find_retained",
    "find_sizes",
    "find_threads",
]


MIN_SHARE_BATCH = 0.25
"""Share of a step that a larger batch must save: every net gains a little."""


def find_sizes(record: Record) -> Found:
    """Inputs of new shapes: what a first visit costs."""
    shapes = [tuple(step["shape"]) for step in record.steps if step["shape"]]
    visits = Counter(shapes)
    if len(visits) < 2:
        return [], []
    first = first_visits(record)
    control = control_of(record, "sizes")
    if control is None:
        return [], []
    one = compare(control, "new", "one")
    again = compare(control, "new", "again")
    of_first = sum(
        sum(step["stages"].get(s, 0.0) for s in ("forward", "loss", "backward"))
        for step, is_first in zip(record.steps, first, strict=True)
        if is_first
    )
    num_first = sum(first)
    tuned = sum(
        1 for step, new in zip(record.steps, first, strict=True) if new and step.get("tunes")
    )
    size = "x".join(map(str, control["one"]))
    measured = (
        f"a shape never seen takes {ms(one.before_s)} forward and backward, the same at once "
        f"again {ms(again.after_s)}, as many elements in one shape ({size}) {ms(one.after_s)} "
        f"({one.rounds} rounds in turn)"
        f"{_made(record)}"
    )
    if tuned:
        measured += f"; cuDNN tuned its kernels anew in {tuned} steps (its `benchmark` flag is on)"
    if num_first < 0.5 * len(shapes):
        cost = max(0.0, again.share) * of_first
        if record.matters(cost) and again.certain:
            measured = f"{measured}; the first visits are over once all shapes were seen"
        return [], [
            f"{len(visits)} sizes in {len(shapes)} steps: harmless after the first visits, which "
            f"cost {cost:.2f} s in all, {record.share(cost)}; {measured}"
        ]
    cost = one.share * of_first
    what = "every step a new size" if num_first >= 0.9 * len(shapes) else "most steps a new size"
    if not (record.matters(cost) and one.certain):
        said = f"{max(cost, 0.0):.2f} s, {record.share(max(cost, 0.0))}"
        return [], [f"{what}: costs next to nothing here, {said}; {measured}"]
    return [
        Finding(
            cause=what,
            cost_s=cost,
            evidence=f"{num_first} of {len(shapes)} steps had a new shape; {measured}",
            change="bring the images onto a few planned canvases (`anysize plan`, exact), or pad, "
            "crop or group them to a few sizes",
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}; as many "
            "elements in one shape, without padding",
        )
    ], []


def _made(record: Record) -> str:
    """Primitives that oneDNN makes for a new shape, in words; "" where its log was not read."""
    new, again = counted(record, "primitives new"), counted(record, "primitives again")
    if not (new and again):
        return ""
    return (
        f"; by its own log oneDNN makes {new['made']:.0f} primitives in {new['made_ms']:.1f} ms "
        f"for a shape never seen, {again['made']:.0f} for one seen before"
    )


def find_compiling(record: Record) -> Found:
    """The compiler at work after the first step."""
    cost = record.stage_s("compiling")
    if record.facts.get("fallback"):
        return _fallback(record), []
    steps = [i for i, step in enumerate(record.steps) if step["compiles"]]
    if not steps:
        return [], []
    said = f"{len(steps)} of {len(record.steps)} steps compiled, {cost:.2f} s in all"
    lasting = len(steps) >= 3 or steps[-1] >= len(record.steps) / 2
    if not (lasting and record.matters(cost)):
        return [], [f"torch.compile: {said}, {record.share(cost)}, and was done with it"]
    first = first_visits(record)
    with_new = sum(first[i] for i in steps)
    by_size = with_new >= 0.9 * len(steps)
    if by_size:
        always = sum(first) >= 0.9 * len(record.steps)
        cause = f"{'every step' if always else 'a step of'} a new size: torch.compile recompiles"
        change = (
            "bring the inputs onto a few planned shapes (`anysize plan`, exact), or pad them; or "
            "let one graph serve all (`torch.compile(dynamic=True)`)"
        )
    else:
        cause = "torch.compile recompiles"
        change = (
            "what changes between steps is a guard of the graph, and no shape: a number or flag of "
            "Python; make it a tensor. TORCH_LOGS=recompiles names each guard that failed"
        )
    return [
        Finding(
            cause=cause,
            cost_s=cost,
            evidence=f"{said}, after the first step; {with_new} of these steps had a shape for the "
            "first time",
            change=change,
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}: the time in the "
            "compiler",
        )
    ], []


def _fallback(record: Record) -> list[Finding]:
    """The compiler has met its limit, so later shapes or flags run as if nothing were compiled."""
    cost = record.stage_s("compiling")
    return [
        Finding(
            cause="torch.compile has given up: recompile limit",
            cost_s=cost,
            evidence=f"the compiler said: {record.facts['fallback']}; {cost:.2f} s went into "
            "compiling, and what came later ran uncompiled",
            change="bring the inputs onto a few planned shapes (`anysize plan`, exact), let one "
            "graph serve all (`torch.compile(dynamic=True)`), or do not compile",
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s in the compiler, and what a compiled step "
            "saves, which was not measured",
        )
    ]


def find_channels_last(record: Record) -> Found:
    """Layers that lose channels-last."""
    control = control_of(record, "channels last")
    if control is None:
        return [], []
    saved = compare(control, "as it is", "kept")
    lost = ", ".join(f"`{name}`" for name in control["lost by"][:3])
    turned = counted(record, "copies").get("memory format")
    said = ""
    if turned:
        megabytes = turned["bytes"] / 1e6
        said = f"; {turned['calls']} conversions of memory format a step, {megabytes:.1f} MB"
    return tried(
        record,
        saved,
        cause="channels-last lost by one layer",
        evidence=f"{lost} takes channels-last and gives another layout: {ms(saved.before_s)}, "
        f"{ms(saved.after_s)} where it is kept{said}",
        change=f"let {lost} keep the layout, or `.contiguous(memory_format=torch.channels_last)` "
        "behind it",
    )


def find_retained(record: Record) -> Found:
    """Graphs that several backward passes walk."""
    walked = sum(step.get("walked", 0) for step in record.steps)
    repeated = sum(step.get("repeated", 0) for step in record.steps)
    if not repeated:
        return [], []
    cost = record.stage_s("backward") * repeated / walked
    said = (
        f"{walked / len(record.steps):.0f} nodes of kept graphs are walked in a step's backward "
        f"passes, {repeated / len(record.steps):.0f} of them again"
    )
    if not record.matters(cost):
        return [], [f"retain_graph: {said}; {record.share(cost)}"]
    return [
        Finding(
            cause="backward walks the same graph again (retain_graph)",
            cost_s=cost,
            evidence=f"{said}, {walked / max(walked - repeated, 1):.1f} times as many as there are",
            change="call backward once on the sum of the losses, or on each loss alone and without "
            "retain_graph: gradients add up by themselves",
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}",
        )
    ], []


def find_float64(record: Record) -> Found:
    """Parameters in float64."""
    control = control_of(record, "float64")
    if control is None:
        return [], []
    saved = compare(control, "as it is", "float32")
    return tried(
        record,
        saved,
        cause="float64 by accident",
        evidence=f"parameters are float64: {ms(saved.before_s)}, {ms(saved.after_s)} in float32",
        change="make the net and its inputs float32 (numpy's arrays are float64: `.float()`)",
    )


def find_threads(record: Record) -> Found:
    """More threads than cores."""
    control = control_of(record, "threads")
    if control is None:
        return [], []
    saved = compare(control, "as it is", "cores")
    return tried(
        record,
        saved,
        cause="more threads than cores",
        evidence=f"{control['threads']} threads on {control['cores']} cores: "
        f"{ms(saved.before_s)}, {ms(saved.after_s)} with {control['cores']} threads",
        change=f"torch.set_num_threads({control['cores']}), or OMP_NUM_THREADS={control['cores']}",
    )


def find_batch(record: Record) -> Found:
    """A batch so small that a larger one is faster for each sample."""
    control = control_of(record, "batch")
    if control is None:
        return [], []
    saved = compare(control, "as it is", "larger")
    # A step of the optimiser takes as long for any batch, and a larger one needs fewer of them.
    optimiser_s = record.stage_s("optimiser") * (1 - control["batch"] / control["larger"])
    if record.controls.get("optimiser"):
        optimiser_s = 0.0  # The control has taken its steps.
    return tried(
        record,
        saved,
        cause="tiny batch",
        evidence=f"{control['batch']} a batch: {ms(saved.before_s)}, and {ms(saved.after_s)} for "
        f"as many in a batch of {control['larger']}",
        change=f"a batch of {control['larger']} or more, with the learning rate to match"
        + (
            "; images of many sizes need one shape for that: planned canvases (`anysize plan`, "
            "exact), padding, or batches of images of one size"
            if len({tuple(step["shape"] or ()) for step in record.steps}) > 1
            else ""
        ),
        share=MIN_SHARE_BATCH,
        also_s=optimiser_s,
    )
