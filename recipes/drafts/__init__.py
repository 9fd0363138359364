"""The recipe for more drafts of the embedded target: one distilled for longer, and one with a vocabulary of its own.

Run it with `python -m recipes.drafts --help` from the repository root, after the family itself; README.md has the commands.
"""
