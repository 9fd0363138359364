"""Audit: test whether the running system is statistically indistinguishable from plain decoding, with controls."""
