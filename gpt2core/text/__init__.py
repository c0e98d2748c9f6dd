"""Text to token ids, and token ids in files."""
