"""Recipe of the embedded family: a Llama-shaped target and its distilled draft.

Run it with `python -m recipes.family --help` from the repository root. README.md has the commands.
"""
