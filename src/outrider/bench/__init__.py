"""Benchmarks: speed, acceptance and equality of output, always against plain decoding in the same run.

This package uses only the ``LLM`` facade.
"""
