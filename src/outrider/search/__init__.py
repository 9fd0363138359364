"""Finds the plan for a user's traffic: record, replay, price, predict, confirm, choose."""

from outrider.search.search import Question, Search

__all__ = ["Question", "Search"]
