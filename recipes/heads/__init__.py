"""Recipe of the embedded family's heads: Medusa, EAGLE-1 and EAGLE-3, trained on the same captured features.

Run it with `python -m recipes.heads --help` from the repository root, after the family's recipe. README.md has the commands.
"""
