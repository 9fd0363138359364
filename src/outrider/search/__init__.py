"""Search for the fastest plan for given traffic, by successive halving over measured runs."""

from outrider.search.search import Search, SearchSpace

__all__ = ["Search", "SearchSpace"]
