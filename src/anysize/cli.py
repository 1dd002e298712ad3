"""The command line: arguments in, exit codes out.

0 fine, 1 found problems, 2 usage or bad input, 130 interrupted. Each verb imports what it needs
when it runs, so that `--help` does not wait for PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anysize import __version__
from anysize.errors import AnysizeError, ConfigError, StoppedByUserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anysize.checkpoint import Weights
    from anysize.config import PlanConfig, RunConfig
    from anysize.predict import Labeller


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    parsed = _parser().parse_args(arguments)
    console = Console(soft_wrap=True)
    try:
        code: int | None = parsed.run(parsed, console)
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
    return code or 0


def _say(message: str) -> None:
    print(f"anysize: {message}", file=sys.stderr)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anysize",
        description="Train and run pixel labellers on images of any size, at native resolution.",
        epilog=_epilog(
            "anysize demo -o demo",
            "anysize check data",
            "anysize plan data -o plan.json",
            "anysize convert resnet_v1_101.ckpt -o resnet_v1_101.safetensors",
            "anysize train run.toml",
            "anysize evaluate run",
            "anysize predict run photos -o predictions",
            "anysize export run -o model.onnx",
            "anysize doctor run.toml",
            "anysize report run",
            "anysize why train.py",
            "anysize bench --plot bench.png",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anysize {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    demo = _verb(verbs, "demo", _demo, "the whole job on real images", "anysize demo -o demo")
    demo.add_argument("-o", "--out", type=Path, default=Path("demo"), help="folder to write to")

    check = _verb(
        verbs,
        "check",
        _check,
        "name every fault in a data folder, file by file; exit 1 where there is one",
        "anysize check data",
        "anysize check run.toml --json check.json",
        "anysize check data --fix corrected-data",
    )
    check.add_argument("data", type=Path, metavar="DATA", help="data folder or run.toml")
    check.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        metavar="F",
        help="write all findings as JSON to F; without F, to standard output and nothing else",
    )
    check.add_argument(
        "--fix", type=Path, metavar="DIR", help="write a corrected copy to a new folder"
    )
    check.add_argument(
        "--max-pixels", type=int, help="most canvas pixels at once, over plan.max_pixels_per_step"
    )

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
    plan.add_argument("--max-canvases", type=int, help="most canvas shapes (as many as pay)")
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
    train.add_argument(
        "--as-before",
        action="store_true",
        help="with --resume: with the images that the run began with, whatever was added since",
    )

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
        "--output-stride",
        type=int,
        choices=(8, 16, 32),
        help="that the head was trained at (default: the file's where it says one, else 16)",
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
    predict.add_argument(
        "weights", type=Path, metavar="RUN", help="run folder, weights file, or exported .onnx"
    )
    predict.add_argument("images", type=Path, nargs="+", help="image files and folders")
    predict.add_argument("-o", "--out", type=Path, required=True, help="folder to write to")
    predict.add_argument(
        "--probabilities", action="store_true", help="also write float16 arrays [class, h, w]"
    )
    predict.add_argument(
        "--max-pixels", type=int, help="larger images run in overlapping tiles (default 2048x2048)"
    )
    _computing_options(predict)

    export = _verb(
        verbs,
        "export",
        _export,
        "write a net as one ONNX file, and hold it against our own prediction",
        "anysize export run -o model.onnx",
    )
    export.add_argument("weights", type=Path, metavar="RUN", help="run folder or weights file")
    export.add_argument("-o", "--out", type=Path, required=True, help="file to write; ends .onnx")
    export.add_argument(
        "--output",
        choices=("logits", "labels"),
        default="logits",
        help="what the file gives; logits (the default) can be tiled",
    )

    doctor = _verb(
        verbs,
        "doctor",
        _doctor,
        "say where the time of a run goes, and what to change; exit 1 where something is found",
        "anysize doctor run.toml",
        "anysize doctor run --seconds 120 --json doctor.json",
        "anysize doctor run.toml --apply run-faster.toml",
    )
    doctor.add_argument("subject", type=Path, metavar="RUN", help="run folder or run.toml")
    doctor.add_argument("--json", type=Path, metavar="F", help="also write it all as JSON")
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

    report = _verb(
        verbs,
        "report",
        _report,
        "draw a run: one HTML page, readable while it trains",
        "anysize report run",
    )
    report.add_argument("weights", type=Path, metavar="RUN", help="run folder")

    why = _verb(
        verbs,
        "why",
        _why,
        "say why a PyTorch training script is slow; runs it unchanged for some steps",
        "anysize why train.py",
        "anysize why --steps 200 --html why.html train.py --lr 0.1",
    )
    why.add_argument("script", type=Path, metavar="SCRIPT.py")
    why.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="of the script; options of anysize go before it",
    )
    why.add_argument("--steps", type=int, default=60, help="optimiser steps (default 60)")
    why.add_argument(
        "--seconds", type=float, default=120.0, help="most seconds after the first step (120)"
    )
    why.add_argument("--json", type=Path, metavar="F", help="also write verdict and steps as JSON")
    why.add_argument("--html", type=Path, metavar="F", help="also write one HTML page")
    _bench_options(
        _verb(
            verbs,
            "bench",
            _bench,
            "what images of many sizes cost: plain PyTorch, padding and exact canvases, by turns",
            "anysize bench --json bench.json --plot bench.png",
            "anysize bench --full --data photos",
        )
    )
    return parser


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
    bench.add_argument("--depth", type=int, choices=(50, 101, 152, 200), default=50)
    bench.add_argument("--output-stride", type=int, choices=(8, 16, 32), default=16)
    bench.add_argument(
        "--units", type=_units, default=(), metavar="A,B,C,D", help="another net: units a block"
    )
    bench.add_argument("--base-depth", type=int, default=64, help="channels of the stem")
    bench.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    bench.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    bench.add_argument("--json", type=Path, metavar="F", help="also write it all as JSON")
    bench.add_argument("--plot", type=Path, metavar="F.png", help="draw step times")
    bench.add_argument(
        "--peers", type=Path, metavar="PYTHON", help="of a venv with tf_slim, to measure it too"
    )


def _units(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace, Console], int | None],
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


def _check(parsed: argparse.Namespace, console: Console) -> int:
    from anysize.check import check_data, describe_report, folder_config, report_json
    from anysize.check_fix import describe_fixed, require_apart, write_fixed
    from anysize.files import write_atomic

    if parsed.data.suffix == ".toml":
        from anysize.checkpoint import load_run_config

        config = load_run_config(parsed.data)
        root, kind = parsed.data.resolve().parent / config.data.root, config.loss.kind
    else:
        config, root, kind = folder_config(parsed.data), parsed.data, None
    config = _check_settings(parsed, config)
    if parsed.fix:
        require_apart(parsed.fix, root)
    to_stdout = parsed.json == Path("-")
    if to_stdout:
        console = Console(quiet=True)
    num_threads = min(os.cpu_count() or 1, 16)
    with _counted(console, "check") as count:
        report = check_data(config, root, kind, num_threads=num_threads, progress=count)
    console.print(describe_report(report), highlight=False, markup=False)
    if parsed.json:
        text = json.dumps(report_json(report), indent=2) + "\n"
        if to_stdout:
            sys.stdout.write(text)
        else:
            write_atomic(parsed.json, text.encode())
            console.print(f"Wrote {parsed.json}.", highlight=False, markup=False)
    if parsed.fix:
        with _counted(console, "fix") as count:
            fixed = write_fixed(report, parsed.fix, num_threads=num_threads, progress=count)
        console.print(describe_fixed(fixed, parsed.fix), highlight=False, markup=False)
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


@contextlib.contextmanager
def _counted(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """What is called with the numbers done and of all: a bar, or ten lines where no one watches."""
    with _progress(console) as progress:
        bar = progress.add_task(what)

        def count(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)
            if not console.is_terminal and total >= 200 and done % (total // 10) == 0:
                console.print(f"{what}: {done} of {total} images", highlight=False)

        yield count


def _plan(parsed: argparse.Namespace, console: Console) -> None:
    import dataclasses

    from anysize.config import DataConfig, ModelConfig, PlanConfig, TrainConfig
    from anysize.data.samples import images_of
    from anysize.plan.canvases import (
        describe_plan,
        plan_canvases,
        worthwhile_canvases,
        write_plan,
    )
    from anysize.plan.fingerprint import fingerprint

    if parsed.data.suffix == ".toml":
        from anysize.checkpoint import load_run_config
        from anysize.train import most_canvases, training_sizes

        config = load_run_config(parsed.data)
        settings, geometry = _plan_settings(parsed, config.plan), config.model.geometry
        if parsed.output_stride not in (None, geometry.output_stride):
            raise ConfigError(
                f"--output-stride is {parsed.output_stride}, but model.output_stride is "
                f"{geometry.output_stride} ({parsed.data}). Leave the option out."
            )
        sizes, largest, found = training_sizes(config, parsed.data.resolve().parent)
        for line in found:
            console.print(line, highlight=False)
        config = dataclasses.replace(config, plan=settings)
        max_canvases = most_canvases(config, sizes, num_images=len(largest))
    else:
        settings = _plan_settings(parsed, PlanConfig())
        geometry = ModelConfig(output_stride=parsed.output_stride or 16).geometry
        sizes = largest = fingerprint(images_of(parsed.data, DataConfig(root="")))
        max_canvases = settings.max_canvases or worthwhile_canvases(
            sizes, epochs=TrainConfig().epochs, on_gpu=False
        )
    plan = plan_canvases(
        sizes,
        geometry=geometry,
        images_per_step=settings.images_per_step,
        max_pixels_per_step=settings.max_pixels_per_step,
        max_canvases=max_canvases,
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

    if parsed.as_before and not parsed.resume:
        raise ConfigError("--as-before goes with --resume.")
    run = train(
        parsed.config,
        parsed.overrides,
        resume=parsed.resume,
        agrees=_agrees(parsed, console),
        console=console,
    )
    console.print(f"Done. The run is in {run}.", highlight=False)


def _agrees(parsed: argparse.Namespace, console: Console) -> Callable[[str], bool] | None:
    """How a question of a resumed run is answered: by an option, or by a person at a terminal."""
    if parsed.as_before:
        return lambda question: True
    if not sys.stdin.isatty():
        return None

    def ask(question: str) -> bool:
        from rich.prompt import Confirm

        return Confirm.ask(question, console=console, default=True)

    return ask


def _convert(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.checkpoint import write_weights_file
    from anysize.data.samples import read_classes
    from anysize.weights.convert import convert, describe

    if parsed.out.suffix != ".safetensors":
        raise ConfigError(f"--out is {parsed.out}; a weights file ends with .safetensors.")
    if parsed.out.exists():
        raise ConfigError(f"{parsed.out} is there already. Remove it, or write to another name.")
    _require_folder(parsed.out)
    file, foreign = convert(
        parsed.checkpoint,
        head=parsed.head,
        kind=parsed.loss,
        classes=read_classes(parsed.classes) if parsed.classes else None,
        head_relu=parsed.head_relu,
        output_stride=parsed.output_stride,
        mean=parsed.mean,
    )
    console.print(describe(foreign), highlight=False)
    write_weights_file(parsed.out, file)
    if file.classes is None:
        what = "a body; a head is trained by `train.weights` in a run.toml"
    else:
        what = (
            f"body and head, {len(file.classes.names)} classes, {file.kind}, output stride "
            f"{file.config.output_stride}"
        )
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
    from anysize.predict import DEFAULT_MAX_PIXELS, find_images, label_files

    max_pixels = DEFAULT_MAX_PIXELS if parsed.max_pixels is None else parsed.max_pixels
    if max_pixels < 1:
        raise ConfigError(f"--max-pixels is {max_pixels}; it must be at least 1.")
    labeller = _labeller(parsed)
    total = len(find_images(parsed.images))
    with _progress(console) as progress:
        bar = progress.add_task("predict", total=total)
        for done in label_files(
            labeller,
            parsed.images,
            parsed.out,
            max_pixels=max_pixels,
            probabilities=parsed.probabilities,
        ):
            progress.advance(bar)
            tiles = f" in {done.num_tiles} overlapping tiles" if done.num_tiles > 1 else ""
            console.print(f"{done.image} ({done.size}){tiles} -> {done.masks[0]}", highlight=False)


def _labeller(parsed: argparse.Namespace) -> Labeller:
    if parsed.weights.suffix != ".onnx" or parsed.weights.is_dir():
        from anysize.predict import NetLabeller

        return NetLabeller(
            weights=_weights(parsed.weights, parsed.device), precision=parsed.precision
        )
    from anysize.onnx_file import open_onnx

    if parsed.device == "cuda" or parsed.precision != "float32":
        raise ConfigError(
            f"{parsed.weights} runs on the CPU in float32. Leave out --device and --precision, or "
            "predict with the run it was exported from."
        )
    return open_onnx(parsed.weights)


def _export(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.checkpoint import read_weights_file
    from anysize.export_onnx import describe, export

    _require_folder(parsed.out)
    source = read_weights_file(_weights_path(parsed.weights)).source
    weights = _weights(parsed.weights, "cpu")
    check = export(weights, parsed.out, output=parsed.output, source=source)
    console.print(f"Wrote {parsed.out}: {describe(check)}.", highlight=False)


def _doctor(parsed: argparse.Namespace, console: Console) -> int:
    import dataclasses

    from anysize.doctor.apply import Promise, changes_of, faster_file, read_promise, write_faster
    from anysize.doctor.diagnose import describe, diagnose
    from anysize.doctor.findings import to_json
    from anysize.doctor.measure import find_subject, measure
    from anysize.files import write_atomic

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    subject = find_subject(parsed.subject)
    out = None
    if parsed.apply is not None:
        out = faster_file(subject, parsed.apply if parsed.apply.name else None)
    measured = measure(subject, seconds=parsed.seconds, say=say)
    diagnosis = diagnose(measured)
    say(describe(measured, diagnosis))
    promise = read_promise(subject.source)
    if promise is not None:
        say(
            f"Before the changes of {subject.source} an epoch took {promise.before_s:.2f} s, and "
            f"{promise.expected_s:.2f} s were expected; now it takes "
            f"{diagnosis.verdict.wall_s:.2f} s."
        )
    if out is not None and changes_of(diagnosis.verdict.findings):
        now = Promise(diagnosis.verdict.wall_s, diagnosis.expected_s)
        say(write_faster(subject, diagnosis.verdict.findings, out, promise=now))
    elif out is not None:
        say("Nothing to apply: no finding has a key of run.toml that keeps the results.")
    if parsed.json:
        table = {
            **to_json(diagnosis.verdict),
            "expected_s": diagnosis.expected_s,
            "before": None if promise is None else dataclasses.asdict(promise),
            "measurements": dataclasses.asdict(measured),
        }
        write_atomic(parsed.json, (json.dumps(table, indent=2) + "\n").encode())
        say(f"Wrote {parsed.json}.")
    return 1 if diagnosis.verdict.findings else 0


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.report import write_report

    console.print(f"Wrote {write_report(parsed.weights)}.", highlight=False)


def _why(parsed: argparse.Namespace, console: Console) -> int:
    from anysize.doctor.findings import DoctorError
    from anysize.doctor.why import describe, explain, watch, watched_json
    from anysize.files import write_atomic

    for report in (parsed.json, parsed.html):
        if report is not None and not report.absolute().parent.is_dir():
            raise ConfigError(f"{report}: its folder is not there. Make it first.")
    reports = {name: path.absolute() for name in ("json", "html") if (path := vars(parsed)[name])}
    watched = watch(parsed.script, parsed.arguments, num_steps=parsed.steps, seconds=parsed.seconds)
    try:
        found = explain(watched)
    except DoctorError as error:
        _say(str(error))
        return watched.code
    console.print(describe(watched, found), highlight=False, markup=False)
    if "json" in reports:
        text = json.dumps(watched_json(watched, found), indent=1) + "\n"
        write_atomic(reports["json"], text.encode())
    if "html" in reports:
        from anysize.doctor.page import page

        write_atomic(reports["html"], page(watched, found).encode())
    for path in reports.values():
        console.print(f"Wrote {path}.", highlight=False, markup=False)
    return watched.code


def _bench(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.bench.settings import bench_settings
    from anysize.bench.slim import require_peer
    from anysize.bench.table import ARM_COLUMNS, RATIO_COLUMNS, arm_rows, ratio_rows
    from anysize.config import ModelConfig
    from anysize.files import write_atomic

    for out in (parsed.json, parsed.plot):
        if out is not None:
            _require_writable(out)
    if parsed.plot and parsed.plot.suffix != ".png":
        raise ConfigError(f"--plot is {parsed.plot}; it must end with .png.")
    if parsed.plot and parsed.plot == parsed.json:
        raise ConfigError(f"--json and --plot are the same file, {parsed.plot}. Name two.")
    model = ModelConfig(
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

    result = run_bench(settings, lambda line: console.print(line, highlight=False, markup=False))
    _print_table(console, ARM_COLUMNS, arm_rows(result))
    _print_table(console, RATIO_COLUMNS, ratio_rows(result))
    if parsed.json:
        write_atomic(parsed.json, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    if parsed.plot:
        from anysize.bench.plot import step_times_png

        write_atomic(parsed.plot, step_times_png(result))
    for out in (parsed.json, parsed.plot):
        if out is not None:
            console.print(f"Wrote {out}.", highlight=False, markup=False)


def _print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table at a terminal, plain lines elsewhere."""
    if console.is_terminal:
        from rich.table import Table

        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    console.print("\n" + "; ".join(columns), highlight=False, markup=False)
    for row in rows:
        console.print("; ".join(row), highlight=False, markup=False)


def _require_writable(out: Path) -> None:
    """Before long work: a file that could not be written would be its loss."""
    import tempfile

    _require_folder(out)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. Name a file.")
    with tempfile.TemporaryFile(dir=out.absolute().parent):
        pass


def _require_folder(out: Path) -> None:
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: its folder is not there. Make it first.")


def _weights(path: Path, device: Literal["auto", "cpu", "cuda"]) -> Weights:
    from anysize.checkpoint import load_weights
    from anysize.world import select_device

    return load_weights(_weights_path(path), select_device(device))


def _weights_path(path: Path) -> Path:
    return path / "weights.safetensors" if path.is_dir() else path


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}[/]"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
