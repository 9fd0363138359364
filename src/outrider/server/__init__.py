"""OpenAI-compatible HTTP server for one engine, and the demo page.

This module imports nothing, so that some submodules work without the libraries of ``outrider[serve]``.
"""
