"""OpenAI-compatible HTTP server for one engine, and the demo page. The only package with asynchronous code.

Nothing is imported here, so that parts can be used without the libraries of ``outrider[serve]``.
"""
