"""Benchmarks: speed, acceptance and equality of output, always against plain decoding in the same run."""
