"""Verbs that look at a data folder: init, check and plan."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from anysize.cli.output import STDOUT, add_json_option, counted, prepare_outputs, write_output
from anysize.cli.parsing import verb
from anysize.errors import ConfigError
from anysize.wording import say

if TYPE_CHECKING:
    from anysize.config import PlanConfig, RunConfig


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this group to the parser."""
    init = verb(
        verbs,
        "init",
        _init,
        "write a classes.toml and a run.toml for a data folder; nothing is overwritten",
        "anysize init data",
    )
    init.add_argument("data", type=Path, metavar="DATA", help="folder of images and labels")
    init.add_argument(
        "-o", "--out", type=Path, help="run.toml to write (default: beside the data folder)"
    )

    check = verb(
        verbs,
        "check",
        _check,
        "name every fault in a data folder, file by file; exit 1 where there is one",
        "anysize check data",
        "anysize check run.toml --json check.json",
    )
    check.add_argument("data", type=Path, metavar="DATA", help="data folder or run.toml")
    add_json_option(check, "all findings", nargs="?", const=STDOUT)
    check.add_argument(
        "--max-pixels", type=int, help="most canvas pixels at once, over plan.max_pixels_per_step"
    )

    plan = verb(
        verbs,
        "plan",
        _plan,
        "choose the canvases for a folder of images, or for a run.toml",
        "anysize plan data -o plan.json --max-canvases 8",
    )
    plan.add_argument("data", type=Path, help="data folder, folder of images, or run.toml")
    plan.add_argument("-o", "--out", type=Path, help="plan file to write; without it, only look")
    plan.add_argument("--images-per-step", type=int, help="images an optimiser step")
    plan.add_argument("--max-pixels-per-step", type=int, help="most canvas pixels at once")
    plan.add_argument(
        "--max-canvases", type=int, help="most canvas shapes (default: chosen automatically)"
    )
    plan.add_argument("--output-stride", type=int, choices=(8, 16, 32), help="of the net")


def _init(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.data.starter import write_starter

    run_toml = parsed.out or parsed.data.resolve().parent / "run.toml"
    prepare_outputs(run_toml, parsed.data / "classes.toml")
    for line in write_starter(parsed.data, run_toml):
        say(console, line)


def _check(parsed: argparse.Namespace, console: Console) -> int:
    from anysize.check.folder import check_data, folder_config
    from anysize.check.report import describe_report, report_json

    if parsed.data.suffix == ".toml":
        from anysize.training.settings import load_run_config

        config = load_run_config(parsed.data)
        root, kind = parsed.data.resolve().parent / config.data.root, config.loss.labels
    else:
        config, root, kind = folder_config(parsed.data), parsed.data, None
    config = _check_settings(parsed, config)
    prepare_outputs(parsed.json)
    num_threads = min(os.cpu_count() or 1, 16)
    with counted(console, "check") as count:
        report = check_data(config, root, kind, num_threads=num_threads, progress=count)
    say(console, describe_report(report))
    write_output(console, parsed.json, (json.dumps(report_json(report), indent=2) + "\n").encode())
    return 0 if report.passed else 1


def _check_settings(parsed: argparse.Namespace, config: RunConfig) -> RunConfig:
    """With whole paths, and the budget of the option."""
    import dataclasses

    plan = config.plan
    if plan.file:
        plan = dataclasses.replace(plan, file=str(parsed.data.resolve().parent / plan.file))
    if parsed.max_pixels is not None:
        if parsed.max_pixels < 1:
            raise ConfigError(f"--max-pixels is {parsed.max_pixels}; it must be at least 1.")
        plan = dataclasses.replace(plan, file="", max_pixels_per_step=parsed.max_pixels)
    return dataclasses.replace(config, plan=plan)


def _plan(parsed: argparse.Namespace, console: Console) -> None:
    import dataclasses

    from anysize.config import DataConfig, ModelConfig, PlanConfig, TrainConfig
    from anysize.data.samples import images_of
    from anysize.images.headers import fingerprint
    from anysize.models.build import geometry_of
    from anysize.planning.canvases import (
        describe_plan,
        plan_canvases,
        worthwhile_canvases,
        write_plan,
    )

    prepare_outputs(parsed.out)
    if parsed.data.suffix == ".toml":
        from anysize.training.plans import most_canvases, training_sizes
        from anysize.training.settings import load_run_config

        config = load_run_config(parsed.data)
        settings, geometry = _plan_settings(parsed, config.plan), geometry_of(config.model)
        if parsed.output_stride not in (None, geometry.output_stride):
            raise ConfigError(
                f"--output-stride is {parsed.output_stride}, but model.output_stride is "
                f"{geometry.output_stride} ({parsed.data}). Leave the option out."
            )
        sizes, largest, found = training_sizes(config, parsed.data.resolve().parent)
        for line in found:
            say(console, line)
        config = dataclasses.replace(config, plan=settings)
        max_canvases = most_canvases(config, sizes, num_images=len(largest))
    else:
        settings = _plan_settings(parsed, PlanConfig())
        geometry = geometry_of(ModelConfig(output_stride=parsed.output_stride or 16))
        sizes = largest = fingerprint(images_of(parsed.data, DataConfig(root="")))
        max_canvases = settings.max_canvases or worthwhile_canvases(
            sizes, epochs=TrainConfig().epochs, on_gpu=False
        )
    with counted(console, "choosing canvases") as progress:
        plan = plan_canvases(
            sizes,
            geometry=geometry,
            images_per_step=settings.images_per_step,
            max_pixels_per_step=settings.max_pixels_per_step,
            max_canvases=max_canvases,
            must_fit=largest,
            progress=progress,
        )
    say(console, describe_plan(plan, sizes))
    if parsed.out:
        write_plan(plan, parsed.out, sizes=sizes)
        say(console, f"Wrote {parsed.out}.")


def _plan_settings(parsed: argparse.Namespace, settings: PlanConfig) -> PlanConfig:
    import dataclasses

    given = {
        key: getattr(parsed, key)
        for key in ("images_per_step", "max_pixels_per_step", "max_canvases")
        if getattr(parsed, key) is not None
    }
    for key, value in given.items():
        if value < 1:
            raise ConfigError(f"--{key.replace('_', '-')} is {value}; it must be at least 1.")
    return dataclasses.replace(settings, **given)
