"""The micro-batches of a rank: how many, on which thread, and the canonical sum of their gradients."""
