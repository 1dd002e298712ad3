"""The planted causes, and how the cost that is claimed is held against the true one.

`python tests/why/planted.py ROUNDS NAME...` measures, prints both, and writes the records that
the quick tests judge again.
"""

import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from anysize_why.causes import judge
from anysize_why.record import Record
from anysize_why.why import explain, watch

SCRIPTS = Path(__file__).parent / "scripts"
RECORDS = Path(__file__).parent / "records"
MAX_KEPT = 200


@dataclass(frozen=True)
class Plant:
    """A script and what must be said first; "" where it must be called healthy."""

    script: str
    cause: str
    num_steps: int = 60
    arguments: tuple[str, ...] = ()
    mended_steps: int = 0
    costs_time: bool = True
    computes: bool = True
    """Whether it only computes: then the time that it had a core is held against the truth, which a
    busy machine disturbs less than the wall clock."""


PLANTS = {
    "new_sizes": Plant("new_sizes", "every step a new size", 16),
    "ten_sizes": Plant("new_sizes", "", 60, ("ten", "eager")),
    "recompiling": Plant("recompiling", "torch.compile recompiles", 16),
    "slow_decoding": Plant("slow_decoding", "slow decoding in the main thread", 40),
    "few_workers": Plant("few_workers", "too few workers", 60, computes=False),
    "many_workers": Plant("many_workers", "too many workers", 37, computes=False),
    "item_each_step": Plant("item_each_step", ".item() in each step", 100),
    "print_each_step": Plant("print_each_step", "print in each step", 60),
    "evaluation": Plant("evaluation", "evaluation inside the loop", 61),
    "checkpointing": Plant("checkpointing", "checkpoint inside the loop", 60),
    "growing_memory": Plant("growing_memory", "memory that grows", 120, costs_time=False),
    "channels_last_lost": Plant("channels_last_lost", "channels-last lost by one layer", 60),
    "float64": Plant("float64", "float64 by accident", 60),
    "tiny_batch": Plant("tiny_batch", "tiny batch", 801, mended_steps=201),
    "many_threads": Plant("many_threads", "more threads than cores", 40, computes=False),
    "wrong_timer": Plant("wrong_timer", "the script's own clock is wrong", 8, costs_time=False),
    "anomaly_detection": Plant(
        "anomaly_detection", "debugging left on: torch.autograd.set_detect_anomaly", 60
    ),
    "anomaly_around": Plant(
        "anomaly_detection", "debugging left on: torch.autograd", 60, ("around",)
    ),
    "hooks_everywhere": Plant("hooks_everywhere", "debugging left on: hooks on modules", 60),
    "retained_graph": Plant("retained_graph", "backward walks the same graph again", 40),
    "becomes_slower": Plant("becomes_slower", "steps become slower", 60),
    "net_made_anew": Plant("net_made_anew", "objects are made anew in the loop", 60),
    "healthy": Plant("healthy", "", 60),
    "healthy_trainer": Plant("healthy_trainer", "", 40),
    "healthy_gan": Plant("healthy_gan", "", 40),
    "healthy_closure": Plant("healthy_closure", "", 12),
    "healthy_compiled": Plant("healthy_compiled", "", 40),
    "right_timer": Plant("right_timer", "", 40),
    "average_timer": Plant("average_timer", "", 40),
}


def script_of(plant):
    return SCRIPTS / f"{plant.script}.py"


@dataclass(frozen=True)
class Measured:
    """One plant, run with and without its cause in turn.

    Shares are of the planted run's time; of each round's.
    """

    watched: object
    claimed: tuple[float, ...]
    true_wall: tuple[float, ...]
    true_cpu: tuple[float, ...]


def measure(name, rounds):
    """Runs a plant; with no rounds only once, and without its cure."""
    plant = PLANTS[name]
    script = script_of(plant)
    runs, claimed, true = [], [], {"wall_s": [], "cpu_s": []}
    for _ in range(max(1, rounds)):
        watched = watch(script, plant.arguments, num_steps=plant.num_steps, seconds=40)
        runs.append(watched)
        found = explain(watched)
        claimed.append(found.findings[0].cost_s / found.wall_s if found.findings else 0.0)
        if rounds:
            steps = plant.mended_steps or plant.num_steps
            arguments = ("mended", *plant.arguments)
            other = watch(script, arguments, num_steps=steps, controls=False)
            for kind, shares in true.items():
                shares.append(1 - seconds(other, kind) / seconds(watched, kind))
    return Measured(runs[0], tuple(claimed), tuple(true["wall_s"]), tuple(true["cpu_s"]))


def true_shares(name, measured):
    """What the cause truly costs: of the time that can be trusted where others use the machine."""
    return measured.true_cpu if PLANTS[name].computes else measured.true_wall


def seconds(watched, kind):
    """Of all measured steps."""
    return sum(step[kind] for step in watched.record.steps)


def keep(name, record):
    """Writes what the probe wrote, rounded, without this machine's paths."""
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(
        {"steps": record.steps[:MAX_KEPT], "facts": record.facts, "controls": record.controls},
        default=str,
    ).replace(str(SCRIPTS.resolve()), "SCRIPTS")

    def rounded(value):
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {key: rounded(inner) for key, inner in value.items()}
        return [rounded(inner) for inner in value] if isinstance(value, list) else value

    (RECORDS / f"{name}.json").write_text(json.dumps(rounded(json.loads(text))) + "\n")


def recorded(name):
    """A record that was kept."""
    script = script_of(PLANTS[name]).resolve()
    text = (RECORDS / f"{name}.json").read_text().replace("SCRIPTS", str(SCRIPTS.resolve()))
    table = json.loads(text)
    return Record(script=str(script), source=script.read_text(), **table)


def without_control(record, name):
    """The same, with a control that was never made."""
    return replace(record, controls={k: v for k, v in record.controls.items() if k != name})


def main():
    rounds, *names = sys.argv[1:]
    for name in names or PLANTS:
        plant = PLANTS[name]
        measured = measure(name, int(rounds) if plant.cause and plant.costs_time else 0)
        keep(name, measured.watched.record)
        found = judge(recorded(name))
        shares = {
            "claimed": measured.claimed, "true wall": measured.true_wall, "cpu": measured.true_cpu
        }  # fmt: skip
        said = ", ".join(
            f"{kind} {statistics.median(values):.1%} ({min(values):.1%} to {max(values):.1%})"
            for kind, values in shares.items()
            if values
        )
        print(f"{name}: {[f.cause for f in found.findings]} of {found.wall_s:.2f} s; {said}",
              file=sys.stderr, flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
