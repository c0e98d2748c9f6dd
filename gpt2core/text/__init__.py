"""Tokenizers, which convert text to token ids, and token files, which store the ids."""
