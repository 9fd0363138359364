"""Quantised checkpoints: one file per format that reads its tensors; ``formats`` chooses, ``stored`` places them in a model."""
