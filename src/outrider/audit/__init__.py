"""Whether the running system can be told from plain decoding: tests with a stated power, and wrong verifiers to be caught."""
