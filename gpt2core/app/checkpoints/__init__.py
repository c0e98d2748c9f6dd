"""Checkpoints: directories that transformers opens, and the state of the run beside the weights."""
