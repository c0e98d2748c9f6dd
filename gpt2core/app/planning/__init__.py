"""Predict a training step without training: what the ranks send, the memory of a rank, the time; and list layouts."""
