"""What the folder names promise; import-linter (scripts/check) holds the order of the layers."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "anysize.errors",
        "anysize.files",
        "anysize.geometry",
        "anysize.config",
        "anysize.plan.canvases",
        "anysize.plan.fingerprint",
        "anysize.metrics",
        "anysize.report",
        "anysize.cli",
    ],
)
def test_the_pure_core_does_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
