"""The command line: arguments in, exit codes out.

0 fine, 1 found problems, 2 usage or bad input, 130 interrupted. Each verb imports what it needs
when it runs, so that `--help` does not wait for PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from anysize import __version__
from anysize.cli import convert, data, predict, prove, speed, train
from anysize.cli.output import STDOUT, Output, complain, drop_output, open_standard_streams
from anysize.cli.parsing import epilog
from anysize.errors import AnysizeError, StoppedByUserError
from anysize_why.findings import WhyError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    open_standard_streams()
    # Of a damaged or strange file we say ourselves what matters.
    warnings.filterwarnings("ignore", module="PIL")
    warnings.filterwarnings("ignore", message="Glyph .* missing from font")
    try:
        parsed = build_parser().parse_args(arguments)
        quiet = vars(parsed).get("json") == STDOUT
        code: int | None = parsed.run(parsed, Output(quiet=quiet))
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("Interrupted.")
        return 130
    except (AnysizeError, WhyError) as error:
        if not getattr(error, "said_by_another", False):
            complain(str(error))
        return 130 if isinstance(error, StoppedByUserError) else 2
    except BrokenPipeError:
        drop_output()
        complain("Standard output was closed before all was written.")
        return 2
    except MemoryError as error:
        complain(" ".join(["Memory ran out", *getattr(error, "__notes__", ())]) + ". Free some.")
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror or error}. Nothing was left half-written.")
        return 2
    return code or 0


def build_parser() -> argparse.ArgumentParser:
    """All verbs with their options."""
    parser = argparse.ArgumentParser(
        prog="anysize",
        description="Train and run pixel labellers on images of any size, at native resolution.",
        epilog=epilog(
            "anysize demo -o demo",
            "anysize init data",
            "anysize check data",
            "anysize plan data -o plan.json",
            "anysize convert resnet_v1_101.ckpt -o resnet_v1_101.safetensors",
            "anysize train run.toml",
            "anysize evaluate run",
            "anysize predict run photos -o predictions",
            "anysize export run -o model.onnx",
            "anysize prove package.module:build",
            "anysize doctor run.toml",
            "anysize report run",
            "anysize why train.py",
            "anysize bench --plot bench.png",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anysize {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    for group in (data, train, predict, convert, prove, speed):
        group.add_verbs(verbs)
    return parser
