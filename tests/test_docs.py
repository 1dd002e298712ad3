"""The documents speak of messages and files that are there."""

import ast
import errno
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
SHORTEST = 10
"""Characters of a piece of a message that is looked for; shorter ones are anywhere."""


def strings_of_the_program():
    """Every text in the source, and the system's; what is filled in stands as `...`."""
    texts = [f": {os.strerror(number)}" for number in errno.errorcode]
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "..." for v in node.values]
                texts.append("".join(parts))
    return "\n".join(texts)


def test_every_message_that_is_explained_is_one_of_the_program():
    page = (ROOT / "docs" / "when-something-goes-wrong.md").read_text()
    messages = re.findall(r"\*\*`([^*]+?)`\*\*", page.replace("\n", " "))
    assert len(messages) > 40
    known = re.sub(r"[`\"']", "", strings_of_the_program())
    lost = []
    for message in messages:
        pieces = re.split(r"\.\.\.|\b[NMXABk]\b|\b[a-z_]+\.toml\b", re.sub(r"[`\"']", "", message))
        lost += [p for p in pieces if len(p.strip()) >= SHORTEST and p.strip(" .") not in known]
    assert not lost


@pytest.mark.parametrize("page", [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
