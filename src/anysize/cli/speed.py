"""Verbs that say where time goes: doctor, why and bench."""

from __future__ import annotations

import argparse
import functools
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from anysize.cli.output import (
    STDOUT,
    add_json_option,
    complain,
    output_to_stderr,
    prepare_outputs,
    print_table,
    write_output,
)
from anysize.cli.parsing import verb
from anysize.config import UNITS, DeviceName
from anysize.errors import ConfigError
from anysize.wording import say

if TYPE_CHECKING:
    pass


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this group to the parser."""
    doctor = verb(
        verbs,
        "doctor",
        _doctor,
        "say where the time of a run goes, and what to change; exit 1 where something is found",
        "anysize doctor run.toml",
        "anysize doctor run --seconds 120 --json doctor.json",
        "anysize doctor run.toml --apply run-faster.toml",
    )
    doctor.add_argument("subject", type=Path, metavar="RUN", help="run folder or run.toml")
    add_json_option(doctor, "it all")
    doctor.add_argument(
        "--apply",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="F",
        help="write the changes that keep results to a new file; without F, to *-faster.toml",
    )
    doctor.add_argument(
        "--seconds", type=float, default=60.0, help="about how long to measure (default 60)"
    )

    why = verb(
        verbs,
        "why",
        _why,
        "say why a PyTorch training script is slow; runs it unchanged for some steps",
        "anysize why train.py",
        "anysize why --steps 200 --html why.html train.py --lr 0.1",
    )
    why.add_argument("script", type=Path, metavar="SCRIPT.py", help="or a notebook, .ipynb")
    why.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m"
    )
    why.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="of the script; options of anysize go before it",
    )
    why.add_argument("--steps", type=int, help="optimiser steps (default 60, and at least 5 s)")
    why.add_argument(
        "--seconds", type=float, default=120.0, help="most seconds after the first step (120)"
    )
    add_json_option(why, "verdict and steps")
    why.add_argument("--html", type=Path, metavar="F", help="also write one HTML page")

    _bench_options(
        verb(
            verbs,
            "bench",
            _bench,
            "what images of many sizes cost: plain PyTorch, padding and exact canvases, by turns",
            "anysize bench --json bench.json --plot bench.png",
            "anysize bench --full --data photos",
            "anysize bench --net smp:Unet --argument encoder_name=resnet34",
        )
    )


def _doctor(parsed: argparse.Namespace, console: Console) -> int:
    import dataclasses

    from anysize.doctor.apply import Promise, changes_of, faster_file, read_promise, write_faster
    from anysize.doctor.diagnose import describe, diagnose
    from anysize.doctor.measure import find_subject, measure
    from anysize_why.findings import to_json

    tell = functools.partial(say, console)
    subject = find_subject(parsed.subject)
    out = None
    if parsed.apply is not None:
        out = faster_file(subject, parsed.apply if parsed.apply.name else None)
    prepare_outputs(parsed.json, out)
    measured = measure(subject, seconds=parsed.seconds, say=tell)
    diagnosis = diagnose(measured)
    tell(describe(measured, diagnosis))
    promise = read_promise(subject.source)
    if promise is not None:
        tell(
            f"Before the changes of {subject.source} an epoch took {promise.before_s:.2f} s, and "
            f"{promise.expected_s:.2f} s were expected; now it takes "
            f"{diagnosis.verdict.wall_s:.2f} s."
        )
    if out is not None and changes_of(diagnosis.verdict.findings):
        now = Promise(diagnosis.verdict.wall_s, diagnosis.expected_s)
        tell(write_faster(subject, diagnosis.verdict.findings, out, promise=now))
    elif out is not None:
        tell("Nothing to apply: no finding has a key of run.toml that keeps the results.")
    if parsed.json:
        table = {
            **to_json(diagnosis.verdict),
            "expected_s": diagnosis.expected_s,
            "before": None if promise is None else dataclasses.asdict(promise),
            "measurements": dataclasses.asdict(measured),
        }
        write_output(console, parsed.json, (json.dumps(table, indent=2) + "\n").encode())
    return 1 if diagnosis.verdict.findings else 0


def _why(parsed: argparse.Namespace, console: Console) -> int:
    from anysize_why.findings import WhyError
    from anysize_why.why import describe, explain, watch, watched_json

    prepare_outputs(parsed.json, parsed.html)
    with output_to_stderr(parsed.json == STDOUT):  # What the script prints.
        watched = watch(
            parsed.script,
            parsed.arguments,
            num_steps=parsed.steps,
            seconds=parsed.seconds,
            module=parsed.module,
        )
    try:
        found = explain(watched)
    except WhyError as error:
        complain(str(error))
        return watched.code
    say(console, describe(watched, found))
    text = json.dumps(watched_json(watched, found), indent=1) + "\n"
    write_output(console, parsed.json, text.encode())
    if parsed.html:
        from anysize_why.page import page

        write_output(console, parsed.html, page(watched, found).encode())
    return watched.code


def _bench(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.bench.settings import bench_settings
    from anysize.bench.slim import require_peer
    from anysize.bench.table import ARM_COLUMNS, RATIO_COLUMNS, arm_rows, ratio_rows
    from anysize.config import ModelConfig

    prepare_outputs(parsed.json, parsed.plot)
    if parsed.plot and parsed.plot.suffix != ".png":
        raise ConfigError(f"--plot is {parsed.plot}; it must end with .png.")
    if parsed.plot and parsed.plot == parsed.json:
        raise ConfigError(f"--json and --plot are the same file, {parsed.plot}. Name two.")
    if parsed.net and parsed.peers:
        raise ConfigError(
            "--peers measures TF-Slim's ResNet, and --net another net. Leave one out."
        )
    model = ModelConfig(
        net=parsed.net,
        arguments=_arguments(parsed.argument),
        depth=parsed.depth,
        units=parsed.units,
        base_depth=parsed.base_depth,
        output_stride=parsed.output_stride,
    )
    settings = bench_settings(
        model,
        data=parsed.data,
        megapixels=parsed.megapixels,
        images=parsed.images,
        rounds=parsed.rounds,
        images_per_step=parsed.images_per_step,
        precision=parsed.precision,
        device=parsed.device,
        full=parsed.full,
        peers=parsed.peers,
    )
    if parsed.peers:
        require_peer(parsed.peers, model)
    from anysize.bench.experiment import run_bench

    result = run_bench(settings, functools.partial(say, console))
    print_table(console, ARM_COLUMNS, arm_rows(result))
    print_table(console, RATIO_COLUMNS, ratio_rows(result))
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_output(console, parsed.json, text.encode())
    if parsed.plot:
        from anysize.bench.plot import step_times_png

        write_output(console, parsed.plot, step_times_png(result))


def _bench_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--data", type=Path, metavar="DIR", help="take the sizes of these images")
    bench.add_argument(
        "--megapixels",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="draw sizes between (default 0.02 0.08; --full 0.03 0.3)",
    )
    bench.add_argument(
        "--full", action="store_true", help="more images, rounds and arms: under 20 minutes, not 3"
    )
    bench.add_argument("--images", type=int, metavar="N", help="sizes (default 52; --full 200)")
    bench.add_argument("--rounds", type=int, metavar="R", help="of turns (default 3; --full 7)")
    bench.add_argument("--images-per-step", type=int, default=4, help="default 4")
    bench.add_argument(
        "--net", default="", help="another net than the ResNet, as model.net in run.toml: smp:Unet"
    )
    bench.add_argument(
        "--argument",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the net, as in [model.arguments]; may be repeated",
    )
    bench.add_argument("--depth", type=int, choices=tuple(UNITS), default=50, help="of the ResNet")
    bench.add_argument(
        "--output-stride", type=int, choices=(8, 16, 32), default=16, help="of the ResNet"
    )
    bench.add_argument(
        "--units", type=_units, default=(), metavar="A,B,C,D", help="another net: units a block"
    )
    bench.add_argument("--base-depth", type=int, default=64, help="channels of the stem")
    bench.add_argument(
        "--device", choices=get_args(DeviceName), default="auto", help="where to compute"
    )
    bench.add_argument(
        "--precision", choices=("bf16", "float32"), default="bf16", help="that the arms compute in"
    )
    add_json_option(bench, "it all")
    bench.add_argument("--plot", type=Path, metavar="F.png", help="draw step times")
    bench.add_argument(
        "--peers", type=Path, metavar="PYTHON", help="of a venv with tf_slim, to measure it too"
    )


def _arguments(given: list[str]) -> dict[str, Any]:
    """Values as TOML has them, or plain text."""
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"--argument takes KEY=VALUE, got {text!r}.")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except ValueError:
            found[key] = value
    return found


def _units(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
