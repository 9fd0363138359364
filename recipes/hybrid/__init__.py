"""A small hybrid on the family's text."""
