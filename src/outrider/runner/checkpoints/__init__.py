"""Quantised checkpoints: each format has a reader of its tensors; ``formats`` chooses, ``stored`` places them in a model."""
