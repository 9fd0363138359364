"""Measuring: speed, acceptance and equality of text, always against plain decoding in the same run.

This room knows the ``LLM`` facade and nothing below it.
"""
