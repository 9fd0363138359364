"""The recipe that trains the embedded family's heads: Medusa, EAGLE-1 and EAGLE-3, from one set of captured features.

Run it with `python -m recipes.heads --help` from the repository root, after the family itself; README.md has the commands.
"""
