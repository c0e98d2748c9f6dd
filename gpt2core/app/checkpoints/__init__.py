"""Checkpoints: directories that transformers opens, with the state of the run; the output directory of a run."""
