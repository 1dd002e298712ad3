"""Runs a script as `python SCRIPT.py` would, and calls back once PyTorch has been imported."""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["MODULE", "AfterTorch", "StopScript", "find_module", "run_script", "script_text"]

MODULE = "-m "
"""What stands before the name of a module that is run instead of a script."""


class StopScript(BaseException):
    """Raised at the end of an optimiser step; no `Exception`, so that few handlers swallow it."""


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls the probe once PyTorch has been imported, whenever the script does so."""

    def __init__(self, installed: Callable[[types.ModuleType], None]) -> None:
        self._installed = installed

    def find_spec(
        self, name: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only `torch`, and only once."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, installed = spec.loader, self._installed

        class Loader(importlib.abc.Loader):
            def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
                return loader.create_module(spec)

            def exec_module(self, module: types.ModuleType) -> None:
                assert module.__spec__ is not None
                module.__spec__.loader = module.__loader__ = loader
                loader.exec_module(module)
                installed(module)

        spec.loader = Loader()
        return spec


def find_module(name: str) -> importlib.machinery.ModuleSpec:
    """What `python -m NAME` would run; the folder that it is called from comes first.

    Raises:
        SystemExit: There is no such module.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError:
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise SystemExit(f"No module named {name} that can be run, from {Path.cwd()} on.")
    return spec


def script_text(path: Path) -> str:
    """The text of a script; of a notebook its code cells, without magic commands."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".ipynb":
        return text
    lines: list[str] = []
    for cell in json.loads(text).get("cells", []):
        code = "".join(cell["source"]) if cell.get("cell_type") == "code" else ""
        if not code.lstrip().startswith("%%"):
            lines += [f"# {x}" if x.lstrip()[:1] in ("%", "!") else x for x in code.splitlines()]
    return "\n".join(lines) + "\n"


def run_script(
    script: Path, arguments: list[str], spec: importlib.machinery.ModuleSpec | None = None
) -> int:
    """Runs a script as `python SCRIPT.py` would; its error is shown, its exit code returned.

    Args:
        script: A file of Python, or a notebook.
        arguments: Of the script.
        spec: Of the module, where it is run as `python -m` would.
    """
    path = str(script.resolve())
    sys.argv = [path if spec else str(script), *arguments]
    if not (spec or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, str(Path(path).parent))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = builtins
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    if spec:
        module.__spec__, module.__package__ = spec, spec.parent
    sys.modules["__main__"] = module
    source: str | bytes = script.read_bytes()
    if script.suffix == ".ipynb":
        source = script_text(script)
        module.__dict__["display"] = print
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    try:
        code = compile(source, path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except StopScript:
        return 0
    except SystemExit as leaving:
        return _exit_code(leaving)
    except BaseException as error:  # noqa: BLE001 - whatever the script raises is shown as its own
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1
