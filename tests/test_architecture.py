"""What the folder names promise; import-linter (scripts/check) holds the order of the layers."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "anysize.errors",
        "anysize.atomic_files",
        "anysize.geometry",
        "anysize.config",
        "anysize.planning.canvases",
        "anysize.images.headers",
        "anysize.predict.metrics",
        "anysize.report",
        "anysize.cli.main",
    ],
)
def test_the_pure_core_does_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
