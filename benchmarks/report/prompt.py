"""Record a prompt on its way through the shipped model of the book: attention scores, the stream, logits of each layer.

The page computes from them what the reader changes: softmax, temperature, top-k, the causal mask.
"""

# T tokens of the prompt, L layers, H heads, D = C / H, V vocabulary

import math

import numpy as np

from gpt2core import ops
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.shipped import BOOK_WEIGHTS
from gpt2core.forward_arguments import FIRST_TOKENS
from gpt2core.model import GPT2
from gpt2core.plain_backend import PlainBackend, split_heads
from gpt2core.tensor import Tensor, no_grad
from gpt2core.text.tokenizer import Tokenizer

PROMPT = "The white whale rose from the sea, and the captain"
DIGITS = 2  # of a recorded logit, score or norm after the decimal point


@no_grad()
def record_prompt(text=PROMPT, weights=BOOK_WEIGHTS):
    """JSON data: tokens; vocabulary; scores (L, H, T, T), norms (2 L + 1, T) and logits (L + 1, T, V) as lists.

    scores are q k' / sqrt(D) before the mask. norms are those of the stream: after the embedding, and after attention
    and MLP of each layer. logits are those of the final LayerNorm and the head, applied after the embedding and after
    each layer; the last ones are the model's.
    """
    checkpoint, tokenizer = load_checkpoint(weights), Tokenizer.load(weights / "tokenizer.json")
    config, backend = checkpoint.config, PlainBackend()
    parameters = {name: Tensor(np.array(p, np.float32), backend) for name, p in checkpoint.parameters.items()}
    model, ids = GPT2(config, parameters), np.array([tokenizer.encode(text)])
    x = model.embedding(ids)
    scores, streams = [], [x]
    for block in model.blocks:
        x, y = block.ln_1(x)
        q, k, _ = split_heads(ops.linear(y, *block.qkv).data, block.n_head)
        scores.append((q @ k.swapaxes(2, 3))[0] / math.sqrt(q.shape[3]))
        x, y = block.ln_2(x + block.attention(y, FIRST_TOKENS))
        streams += [x, x := x + block.mlp(y, FIRST_TOKENS)]
    return {
        "weights": weights.name,
        "tokens": [tokenizer.decode([id]) for id in ids[0].tolist()],
        "vocabulary": [tokenizer.decode([id]) for id in range(config.vocab_size)],
        "scores": rounded(scores),
        "norms": rounded([np.linalg.norm(each.tensor().data[0], axis=-1) for each in streams]),
        "logits": rounded([model.unembed(model.head.ln_f(each)[1]).data[0] for each in streams[::2]]),
    }


def rounded(arrays):
    return np.round(np.array(arrays, np.float64), DIGITS).tolist()
