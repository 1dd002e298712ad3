"""The command line: one file for each group of verbs."""

from anysize.cli.main import main as main
