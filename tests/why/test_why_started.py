"""Scripts that are started in other ways: as a module, as a notebook, by a launcher."""

import json
from pathlib import Path

import pytest
from tests.why.test_why import TRAINING

from anysize_why.findings import WhyError
from anysize_why.running import script_text
from anysize_why.why import watch


def test_a_module_of_a_package_is_run_as_python_m_would(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("SIZE = 8\n")
    text = (
        f"from .sizes import SIZE\n{TRAINING}\nassert sys.argv[1:] == ['a'], sys.argv\ntrain(7)\n"
    )
    (package / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    watched = watch(Path("package.train"), ["a"], controls=False, module=True)
    assert (watched.code, len(watched.record.steps)) == (0, 6)
    assert watched.record.script == str(package / "train.py")
    assert watched.record.source == text
    assert watch(Path("package.no"), controls=False, module=True).code == 1


def test_a_notebook_is_run_as_a_script_without_its_magic(tmp_path, capfd):
    cells = [
        {"cell_type": "markdown", "source": ["# not code\n"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", TRAINING]},
        {"cell_type": "code", "source": ["%%bash\n", "exit 3\n"]},
        {"cell_type": "code", "source": ["display('shown')\n", "train(7)"]},
    ]
    notebook = tmp_path / "train.ipynb"
    notebook.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert "bash" not in script_text(notebook)
    watched = watch(notebook, controls=False)
    assert (watched.code, len(watched.record.steps)) == (0, 6)
    assert "shown" in capfd.readouterr().out


def test_a_launcher_is_refused_in_words():
    with pytest.raises(WhyError, match="torchrun starts processes of its own"):
        watch(Path("torchrun"), ["train.py"])
