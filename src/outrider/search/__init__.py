"""Finds the fastest plan for a traffic by successive halving over measured runs."""

from outrider.search.search import Question, Search

__all__ = ["Question", "Search"]
