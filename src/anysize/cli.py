"""The command line: arguments in, exit codes out.

0 fine, 1 found problems, 2 usage or bad input, 130 interrupted. Each verb imports what it needs
when it runs, so that `--help` does not wait for PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anysize import __version__
from anysize.errors import AnysizeError, ConfigError, StoppedByUserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anysize.checkpoint import Weights
    from anysize.config import PlanConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    parsed = _parser().parse_args(arguments)
    console = Console(soft_wrap=True)
    try:
        parsed.run(parsed, console)
    except KeyboardInterrupt:
        _say("Interrupted.")
        return 130
    except AnysizeError as error:
        _say(str(error))
        return 130 if isinstance(error, StoppedByUserError) else 2
    except BrokenPipeError:
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror or error}. Nothing was left half-written.")
        return 2
    return 0


def _say(message: str) -> None:
    print(f"anysize: {message}", file=sys.stderr)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anysize",
        description="Train and run pixel labellers on images of any size, at native resolution.",
        epilog=_epilog(
            "anysize demo -o demo",
            "anysize plan data -o plan.json",
            "anysize convert resnet_v1_101.ckpt -o resnet_v1_101.safetensors",
            "anysize train run.toml",
            "anysize evaluate run",
            "anysize predict run photos -o predictions",
            "anysize report run",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anysize {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    demo = _verb(verbs, "demo", _demo, "the whole job on real images", "anysize demo -o demo")
    demo.add_argument("-o", "--out", type=Path, default=Path("demo"), help="folder to write to")

    plan = _verb(
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
    plan.add_argument("--max-canvases", type=int, help="most canvas shapes")
    plan.add_argument("--output-stride", type=int, choices=(8, 16, 32), help="of the net")

    train = _verb(
        verbs,
        "train",
        _train,
        "train what a run.toml describes",
        "anysize train run.toml --set train.epochs=20 --set optim.lr=0.01",
    )
    train.add_argument("config", type=Path, metavar="run.toml")
    train.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of run.toml; may be repeated",
    )
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")

    convert = _verb(
        verbs,
        "convert",
        _convert,
        "take over a checkpoint of TF-Slim, Caffe, torchvision or timm",
        "anysize convert resnet_v1_101.ckpt -o resnet_v1_101.safetensors",
        "anysize convert fcn.ckpt-20000 -o fcn.safetensors --loss sigmoid --classes classes.toml",
        "anysize convert ResNet-50-model.caffemodel -o W.safetensors --mean mean.binaryproto",
    )
    convert.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    convert.add_argument("-o", "--out", type=Path, required=True, help="weights file to write")
    convert.add_argument(
        "--head", default="", metavar="NAME", help="which head to take; none takes the body only"
    )
    convert.add_argument(
        "--loss", choices=("softmax", "sigmoid"), help="how the head's logits are meant"
    )
    convert.add_argument(
        "--classes", type=Path, metavar="classes.toml", help="names and colours of the head's"
    )
    convert.add_argument(
        "--head-relu", action="store_true", help="the head ends with a ReLU, as TF-Slim's default"
    )
    convert.add_argument(
        "--mean", type=Path, metavar="F", help="mean image of a .caffemodel (.binaryproto)"
    )

    evaluate = _verb(
        verbs,
        "evaluate",
        _evaluate,
        "score a run on its held-out images, at their own size",
        "anysize evaluate run --json metrics.json",
    )
    evaluate.add_argument("weights", type=Path, metavar="RUN", help="run folder")
    evaluate.add_argument("--json", type=Path, metavar="F", help="also write the scores as JSON")
    evaluate.add_argument("--data", type=Path, help="data folder, if it has moved")
    _computing_options(evaluate)

    predict = _verb(
        verbs,
        "predict",
        _predict,
        "label images; masks have the images' own size",
        "anysize predict run photo.jpg more-photos -o predictions",
    )
    predict.add_argument("weights", type=Path, metavar="RUN", help="run folder or weights file")
    predict.add_argument("images", type=Path, nargs="+", help="image files and folders")
    predict.add_argument("-o", "--out", type=Path, required=True, help="folder to write to")
    predict.add_argument(
        "--probabilities", action="store_true", help="also write float16 arrays [class, h, w]"
    )
    predict.add_argument(
        "--max-pixels", type=int, help="larger images run in overlapping tiles (default 2048x2048)"
    )
    _computing_options(predict)

    report = _verb(
        verbs,
        "report",
        _report,
        "draw a run: one HTML page, readable while it trains",
        "anysize report run",
    )
    report.add_argument("weights", type=Path, metavar="RUN", help="run folder")
    return parser


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace, Console], None],
    summary: str,
    *examples: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_epilog(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _epilog(*examples: str) -> str:
    title = "example:" if len(examples) == 1 else "examples:"
    return "\n  ".join((title, *examples))


def _computing_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")


def _demo(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.demo import run_demo

    run_demo(parsed.out, console)


def _plan(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.config import ModelConfig, PlanConfig
    from anysize.data.samples import list_images
    from anysize.plan.canvases import describe_plan, plan_canvases, write_plan
    from anysize.plan.fingerprint import fingerprint

    if parsed.data.suffix == ".toml":
        from anysize.checkpoint import load_run_config
        from anysize.train import training_sizes

        config = load_run_config(parsed.data)
        settings, geometry = _plan_settings(parsed, config.plan), config.model.geometry
        if parsed.output_stride not in (None, geometry.output_stride):
            raise ConfigError(
                f"--output-stride is {parsed.output_stride}, but model.output_stride is "
                f"{geometry.output_stride} ({parsed.data}). Leave the option out."
            )
        sizes, largest = training_sizes(config, parsed.data.resolve().parent)
    else:
        images = parsed.data / "images"
        folder = images if images.is_dir() else parsed.data
        settings = _plan_settings(parsed, PlanConfig())
        geometry = ModelConfig(output_stride=parsed.output_stride or 16).geometry
        sizes = largest = fingerprint(list_images(folder))
    plan = plan_canvases(
        sizes,
        geometry=geometry,
        images_per_step=settings.images_per_step,
        max_pixels_per_step=settings.max_pixels_per_step,
        max_canvases=settings.max_canvases,
        must_fit=largest,
    )
    console.print(describe_plan(plan, sizes), highlight=False)
    if parsed.out:
        write_plan(plan, parsed.out, sizes=sizes)
        console.print(f"Wrote {parsed.out}.", highlight=False)


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


def _train(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.train import train

    run = train(parsed.config, parsed.overrides, resume=parsed.resume, console=console)
    console.print(f"Done. The run is in {run}.", highlight=False)


def _convert(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.checkpoint import write_weights_file
    from anysize.data.samples import read_classes
    from anysize.weights.convert import convert, describe

    if parsed.out.suffix != ".safetensors":
        raise ConfigError(f"--out is {parsed.out}; a weights file ends with .safetensors.")
    if parsed.out.exists():
        raise ConfigError(f"{parsed.out} is there already. Remove it, or write to another name.")
    file, foreign = convert(
        parsed.checkpoint,
        head=parsed.head,
        kind=parsed.loss,
        classes=read_classes(parsed.classes) if parsed.classes else None,
        head_relu=parsed.head_relu,
        mean=parsed.mean,
    )
    console.print(describe(foreign), highlight=False)
    write_weights_file(parsed.out, file)
    if file.classes is None:
        what = "a body; a head is trained by `train.weights` in a run.toml"
    else:
        what = f"body and head, {len(file.classes.names)} classes, {file.kind}"
    console.print(f"Wrote {parsed.out}: {what}.", highlight=False)


def _evaluate(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.evaluate import evaluate_run, format_table
    from anysize.files import write_atomic

    with _progress(console) as progress:
        bar = progress.add_task("evaluate")
        result = evaluate_run(
            parsed.weights,
            _weights(parsed.weights, parsed.device),
            data=parsed.data,
            precision=parsed.precision,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    console.print(format_table(result), highlight=False)
    if parsed.json:
        write_atomic(parsed.json, json.dumps(result, indent=2).encode())
        console.print(f"Wrote {parsed.json}.", highlight=False)


def _predict(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.predict import DEFAULT_MAX_PIXELS, find_images, predict_files

    max_pixels = DEFAULT_MAX_PIXELS if parsed.max_pixels is None else parsed.max_pixels
    if max_pixels < 1:
        raise ConfigError(f"--max-pixels is {max_pixels}; it must be at least 1.")
    weights = _weights(parsed.weights, parsed.device)
    total = len(find_images(parsed.images))
    with _progress(console) as progress:
        bar = progress.add_task("predict", total=total)
        for done in predict_files(
            weights,
            parsed.images,
            parsed.out,
            max_pixels=max_pixels,
            probabilities=parsed.probabilities,
            precision=parsed.precision,
        ):
            progress.advance(bar)
            tiles = f" in {done.num_tiles} overlapping tiles" if done.num_tiles > 1 else ""
            console.print(f"{done.image} ({done.size}){tiles} -> {done.masks[0]}", highlight=False)


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.report import write_report

    console.print(f"Wrote {write_report(parsed.weights)}.", highlight=False)


def _weights(path: Path, device: Literal["auto", "cpu", "cuda"]) -> Weights:
    from anysize.checkpoint import load_weights
    from anysize.world import select_device

    file = path / "weights.safetensors" if path.is_dir() else path
    return load_weights(file, select_device(device))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}[/]"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
