"""Generation on a CPU: the logits of a new token, products of one row, and choices by timing."""
