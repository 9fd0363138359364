"""The command line: one thin module per command. Nothing heavy is imported before a command needs it."""

from outrider.cli.app import main

__all__ = ["main"]
