"""Runs a script as `python SCRIPT.py` would, and calls back once PyTorch has been imported."""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["AfterTorch", "StopScript", "run_script"]


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


def run_script(script: Path, arguments: list[str]) -> int:
    """Runs a script as `python SCRIPT.py` would; its error is shown, its exit code returned."""
    sys.argv = [str(script), *arguments]
    path = str(script.resolve())
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path(path).parent))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = builtins
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    try:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
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
