"""Recipe for further drafts of the embedded target: one distilled for longer, and one with its own vocabulary.

Run it with `python -m recipes.drafts --help` from the repository root, after the family's recipe. README.md has the commands.
"""
