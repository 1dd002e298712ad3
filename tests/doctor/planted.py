"""The planted causes, and how the cost that is claimed is held against the true one.

`python tests/doctor/planted.py ROUNDS NAME...` measures, prints both, and writes the records that
the quick tests judge again.
"""

import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from anysize.doctor.causes import Record, judge
from anysize.doctor.why import explain, watch

SCRIPTS = Path(__file__).parent / "scripts"
RECORDS = Path(__file__).parent / "records"


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
    "tiny_batch": Plant("tiny_batch", "tiny batch", 201, mended_steps=51),
    "many_threads": Plant("many_threads", "more threads than cores", 40, computes=False),
    "wrong_timer": Plant("wrong_timer", "the script's own clock is wrong", 8, costs_time=False),
    "healthy": Plant("healthy", "", 60),
    "healthy_compiled": Plant("healthy_compiled", "", 40),
}


def script_of(plant):
    return SCRIPTS / f"{plant.script}.py"


def measure(name, rounds):
    """The first watched run, and the shares of the wall clock that are claimed and are true."""
    plant = PLANTS[name]
    script = script_of(plant)
    runs, planted, mended, claimed = [], [], [], []
    for _ in range(max(1, rounds)):
        watched = watch(script, plant.arguments, num_steps=plant.num_steps, seconds=40)
        runs.append(watched)
        found = explain(watched)
        claimed.append(found.findings[0].cost_s / found.wall_s if found.findings else 0.0)
        planted.append(seconds(plant, watched))
        if rounds:
            steps = plant.mended_steps or plant.num_steps
            arguments = ("mended", *plant.arguments)
            other = watch(script, arguments, num_steps=steps, controls=False)
            mended.append(seconds(plant, other))
    true = 1 - statistics.median(mended) / statistics.median(planted) if mended else 0.0
    return runs[0], statistics.median(claimed), true


def seconds(plant, watched):
    """Of all measured steps."""
    kind = "cpu_s" if plant.computes else "wall_s"
    return sum(step[kind] for step in watched.record.steps)


def keep(name, record):
    """Writes what the probe wrote, rounded, without this machine's paths."""
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(
        {"steps": record.steps, "facts": record.facts, "controls": record.controls}, default=str
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
        watched, claimed, true = measure(
            name, int(rounds) if plant.cause and plant.costs_time else 0
        )
        keep(name, watched.record)
        found = judge(recorded(name))
        print(f"{name}: {[f.cause for f in found.findings]} of {found.wall_s:.2f} s; claimed "
              f"{claimed:.1%}, true {true:.1%}", file=sys.stderr, flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
