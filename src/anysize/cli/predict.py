"""Verbs that use a trained net: evaluate and predict."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from anysize.cli.output import add_json_option, prepare_outputs, progress_bar, write_output
from anysize.cli.parsing import computing_options, verb
from anysize.cli.run_folder import load_weights_of, trust_option
from anysize.errors import ConfigError
from anysize.wording import count_of, say

if TYPE_CHECKING:
    from anysize.predict.files import Labeller
    from anysize.predict.versions import Versions
    from anysize.ranks import Ranks


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this group to the parser."""
    evaluate = verb(
        verbs,
        "evaluate",
        _evaluate,
        "score a run on its held-out images or other ones, at their own size",
        "anysize evaluate run --json metrics.json",
        "anysize evaluate run/weights_last.safetensors --data another-folder",
    )
    evaluate.add_argument(
        "weights", type=Path, metavar="RUN", help="run folder, or a weights file in one"
    )
    add_json_option(evaluate, "the scores")
    evaluate.add_argument(
        "--data",
        type=Path,
        help="any labelled folder: all its images, or those held out if it is the run's own, moved",
    )
    _version_options(evaluate)
    computing_options(evaluate)
    trust_option(evaluate)

    predict = verb(
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
    predict.add_argument(
        "--several",
        action="store_true",
        help="joints of several people: every peak of confidence 0.2 or more, not told whose it is",
    )
    _version_options(predict)
    computing_options(predict)
    trust_option(predict)


def _version_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scales",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="S",
        help="average over versions of the image of these scales, such as 0.75 1 1.25",
    )
    parser.add_argument("--mirror", action="store_true", help="average over mirrored versions too")


def _versions(parsed: argparse.Namespace) -> Versions:
    from anysize.predict.versions import Versions

    return Versions(scales=tuple(parsed.scales), mirror=parsed.mirror)


def _evaluate(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.predict.evaluate import evaluate_run, format_table
    from anysize.ranks import join

    prepare_outputs(parsed.json)
    with join() as ranks, progress_bar(console := ranks.console(console)) as progress:
        bar = progress.add_task("evaluate")
        run = parsed.weights if parsed.weights.is_dir() else parsed.weights.parent
        result = evaluate_run(
            run,
            load_weights_of(parsed.weights, parsed.device, trust_net=parsed.trust_net),
            data=parsed.data,
            precision=parsed.precision,
            versions=_versions(parsed),
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
            say=functools.partial(say, console),
            ranks=ranks,
        )
    say(console, format_table(result))
    if ranks.is_first:
        write_output(console, parsed.json, (json.dumps(result, indent=2) + "\n").encode())


def _predict(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.predict.files import find_images, not_read
    from anysize.predict.tiles import DEFAULT_MAX_PIXELS
    from anysize.ranks import join

    max_pixels = DEFAULT_MAX_PIXELS if parsed.max_pixels is None else parsed.max_pixels
    if max_pixels < 1:
        raise ConfigError(f"--max-pixels is {max_pixels}; it must be at least 1.")
    with join() as ranks:
        console = ranks.console(console)
        labeller = _labeller(parsed)
        total = len(find_images(parsed.images))
        for note in not_read(parsed.images):
            say(console, note)
        if labeller.kind == "joints":
            if ranks.size > 1:
                raise ConfigError("Joints are predicted by one process. Start without torchrun.")
            _predict_joints(parsed, console, labeller, max_pixels, total)
            return
        if parsed.several:
            raise ConfigError("--several is for nets of joints. Leave it out.")
        _predict_masks(parsed, console, labeller, max_pixels, total, ranks)


def _predict_masks(
    parsed: argparse.Namespace,
    console: Console,
    labeller: Labeller,
    max_pixels: int,
    total: int,
    ranks: Ranks,
) -> None:
    from anysize.predict.files import label_files

    with progress_bar(console) as progress:
        bar = progress.add_task("predict", total=total)
        for done in label_files(
            labeller,
            parsed.images,
            parsed.out,
            max_pixels=max_pixels,
            probabilities=parsed.probabilities,
            ranks=ranks,
        ):
            progress.advance(bar)
            tiles = f" in {done.num_tiles} overlapping tiles" if done.num_tiles > 1 else ""
            say(console, f"{done.image} ({done.size}){tiles} -> {done.masks[0]}")


def _predict_joints(
    parsed: argparse.Namespace, console: Console, labeller: Labeller, max_pixels: int, total: int
) -> None:
    from anysize.predict.files import NetLabeller
    from anysize.predict.joint_files import joint_files

    assert isinstance(labeller, NetLabeller)
    if parsed.mirror or parsed.scales != [1.0]:
        raise ConfigError("--scales and --mirror are for nets of classes. Leave them out.")
    if parsed.probabilities:
        raise ConfigError("--probabilities is for nets of classes. Leave it out.")
    with progress_bar(console) as progress:
        bar = progress.add_task("predict", total=total)
        for done in joint_files(
            labeller, parsed.images, parsed.out, max_pixels=max_pixels, several=parsed.several
        ):
            progress.advance(bar)
            num = sum(len(places) for places in done.found)
            say(console, f"{done.image} ({done.size}): {count_of(num, 'joint')} -> {done.overlay}")
    say(console, f"Wrote {parsed.out / 'joints.csv'}.")


def _labeller(parsed: argparse.Namespace) -> Labeller:
    if parsed.weights.suffix != ".onnx" or parsed.weights.is_dir():
        from anysize.predict.files import NetLabeller

        return NetLabeller(
            weights=load_weights_of(parsed.weights, parsed.device, trust_net=parsed.trust_net),
            precision=parsed.precision,
            versions=_versions(parsed),
        )
    from anysize.onnx.file import open_onnx

    plain = parsed.precision == "float32" and parsed.scales == [1.0] and not parsed.mirror
    if parsed.device == "cuda" or not plain:
        raise ConfigError(
            f"{parsed.weights} runs on the CPU in float32, as it is. Leave out --device, "
            "--precision, --scales and --mirror, or predict with the run it was exported from."
        )
    return open_onnx(parsed.weights)
