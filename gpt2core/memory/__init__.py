"""The memory of a GPU that trains or generates, predicted as a sum of terms."""
