"""Heads: small modules trained on a target's hidden states to draft for it, and their checkpoint formats."""
