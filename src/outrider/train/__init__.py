"""Training what drafts: text, the target's features captured and kept on disk, heads, and the one training loop."""
