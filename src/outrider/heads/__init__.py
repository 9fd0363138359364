"""Heads: small modules trained on a target's hidden states that draft for it, and the checkpoint formats they come in."""
