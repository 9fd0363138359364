"""Training of drafts and heads: text, captured target features, losses, and the training loop."""
