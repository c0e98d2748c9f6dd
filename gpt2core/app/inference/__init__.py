"""The inference command: weights and prompts in, continuations out."""
