"""Recipe of a small hybrid model, trained on the family's text."""
