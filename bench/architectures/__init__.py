"""Test every architecture of the installed transformers as a tiny model against transformers' own ``generate``."""
