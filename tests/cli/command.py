"""The command as a process, for the tests of this folder."""

import subprocess
import sys
from pathlib import Path

ANYSIZE = str(Path(sys.executable).parent / "anysize")


def anysize(*arguments, cwd, code=0, **options):
    """Runs the command, which must end with `code`; gives all that it printed."""
    done = subprocess.run(
        [ANYSIZE, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr
