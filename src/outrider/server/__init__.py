"""OpenAI-compatible HTTP server for one engine, and the demo page. This is the only package with asynchronous code.

This module imports nothing, so that some submodules work without the libraries of ``outrider[serve]``.
"""
