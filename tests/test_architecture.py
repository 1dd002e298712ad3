"""What the tree promises; import-linter (scripts/check) holds the order of the layers."""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from anysize.cli.main import build_parser

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}

MOST_LINES = 600
TOO_LONG = {
    "anysize/conversion/tf_checkpoint.py",
}
"""Still to be divided; a file that has become short enough must be taken off this list."""


@pytest.mark.parametrize(
    "module",
    [
        "anysize",
        "anysize.errors",
        "anysize.atomic_files",
        "anysize.tables",
        "anysize.geometry",
        "anysize.config",
        "anysize.planning.canvases",
        "anysize.models.levels",
        "anysize.models.build",
        "anysize.images.headers",
        "anysize.predict.metrics",
        "anysize.report",
        "anysize.cli.main",
    ],
)
def test_the_pure_core_does_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_module_has_its_layer():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(c for c in contracts if c.get("containers") == ["anysize"])
    assert layers["exhaustive"]
    named = {name.strip() for layer in layers["layers"] for name in layer.split("|")}
    modules = {p.stem for p in (ROOT / "src/anysize").iterdir() if p.suffix == ".py"}
    rooms = {p.parent.name for p in (ROOT / "src/anysize").glob("*/__init__.py")}
    assert named == (modules | rooms) - {"__init__"}


def test_no_file_is_longer_than_two_readings():
    longer = {
        str(path.relative_to(ROOT / "src"))
        for path in FILES
        if len(path.read_text().splitlines()) > MOST_LINES
    }
    assert longer == TOO_LONG


def test_files_are_named_for_what_is_in_them():
    forbidden = {"utils", "util", "common", "helper", "helpers", "manager", "base", "misc"}
    assert not {p for p in FILES if forbidden & {p.stem, *p.parts}}


def imports_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]


def test_modules_use_only_public_names_of_others():
    private = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path, tree in TREES.items()
        for node in imports_of(tree)
        if node.module.startswith("anysize")
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert not private


def test_lists_of_public_names_are_whole():
    """What `__all__` names exists; where a module has one, others import nothing else from it."""
    named = {}
    for path, tree in TREES.items():
        for node in tree.body:
            is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            if is_list:
                module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
                named[module.removesuffix(".__init__")] = set(ast.literal_eval(node.value))
    assert "anysize" in named
    for path, tree in TREES.items():
        for node in imports_of(tree):
            surplus = {alias.name for alias in node.names} - named.get(node.module, set())
            if node.module in named and node.module != "anysize":
                assert not surplus, f"{path} takes {surplus} from {node.module}"


def test_every_window_of_eight_lines_stands_once():
    seen = {}
    for path in FILES:
        text = re.sub(r"(?m)^ *from \S+ import \([^)]*\)", "", path.read_text())
        lines = [line.strip() for line in text.splitlines()]
        lines = [x for x in lines if x and not x.startswith(("#", "from ", "import ", '"""'))]
        for window in zip(*(lines[i:] for i in range(8)), strict=False):
            if sum(len(line) > 6 for line in window) < 5:
                continue  # Closing brackets mostly.
            other = seen.setdefault(window, path)
            assert other == path, f"{other} and {path} both have:\n" + "\n".join(window)


def verbs():
    parser = build_parser()
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def test_every_verb_has_help_an_example_and_a_place_in_the_reference():
    reference = (ROOT / "docs/reference.md").read_text()
    for name, parser in verbs().items():
        assert f"| `anysize {name} " in reference, name
        assert f"anysize {name}" in (parser.epilog or ""), name
        for action in parser._actions:
            assert action.help or action.metavar, f"{name} {action.option_strings}"


def test_every_function_of_the_surface_is_a_verb_of_the_command_or_load():
    import anysize

    functions = {name for name in anysize.__all__ if name[0].islower()}
    assert {"load", "train", "evaluate", "plan", "convert"} <= functions
    assert {"train", "evaluate", "plan", "convert"} <= set(verbs())
