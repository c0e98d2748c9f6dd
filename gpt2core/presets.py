"""The sizes of models by name."""

from gpt2core.architecture import GPT2Config

# Positional arguments: vocab_size, block_size, n_layer, n_head, n_embd. The default GPT2Config() is GPT-2 124M.
# A new model gets the vocabulary size of its tokenizer instead of the one in this table.
PRESETS = {
    "nano": GPT2Config(172, 16, 2, 2, 32, tied=False),
    "tiny": GPT2Config(172, 64, 2, 4, 64, tied=False),
    "paper": GPT2Config(172, 256, 6, 6, 384, tied=False),
    "book": GPT2Config(2048, 256, 4, 6, 192),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
    "small": GPT2Config(10000),
    "medium": GPT2Config(10000, n_layer=24, n_head=16, n_embd=1024),
    "large": GPT2Config(10000, n_layer=36, n_head=20, n_embd=1280),
    "xl": GPT2Config(10000, n_layer=48, n_head=25, n_embd=1600),
    "2.7B": GPT2Config(10000, n_layer=32, n_head=32, n_embd=2560),
}
