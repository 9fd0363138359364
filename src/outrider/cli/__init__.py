"""Command line: one thin module per command. Heavy imports happen when a command needs them."""

from outrider.cli.app import main, run

__all__ = ["main", "run"]
