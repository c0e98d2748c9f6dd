"""The forward pass of a GPT-2 without autograd, to generate text: it calls the kernels that model.py calls."""

# B batch, T time, C channels, V vocabulary

import functools

import numpy as np

from gpt2core import checks
from gpt2core.architecture import forward_plan
from gpt2core.communicator import SOLO
from gpt2core.recording import no_grad
from gpt2core.vocabulary import Vocabulary, gather_columns


class InferenceModel:
    """A GPT-2 that computes no gradients.

    arrays: {Hugging Face name: array of the backend}. group: the ranks that divide each layer; `arrays` are then this
    rank's shards (parallel/tensor/shards.py). cache, an argument of the methods: a sampler.KVCache, after whose
    tokens the ids follow, or None.
    """

    operations = "attention", "gelu"  # of the Plan

    def __init__(self, config, arrays, backend, group=SOLO):
        self.config, self.arrays, self.backend, self.group = config, arrays, backend, group
        self.n_head, self.vocabulary = config.n_head // group.size, Vocabulary(config.vocab_size, group)

    @functools.cached_property
    def plan(self):
        return forward_plan(self.config, self.arrays, self.operations, "the forward pass")

    @property
    def is_whole(self):
        """Whether this rank has the whole model, not shards of its layers."""
        return self.group.size == 1

    def without_autograd(self):
        """This model: see GPT2.without_autograd()."""
        return self

    @no_grad()
    def next_logits(self, ids, cache):
        """The logits (V) of the token after `ids`, a list of tokens that follow the cached ones; caches `ids` too."""
        logits = self.logits(np.asarray(ids, np.int64)[None], cache, last_only=True)
        cache.length += len(ids)
        return self.backend.to_host(logits)[0, -1]

    @no_grad()
    def logits(self, ids, cache=None, last_only=False):
        """ids (B, T) -> logits (B, T, V), or with last_only those of the last position, (B, 1, V)."""
        own = self.backend.unembed_forward(self.normed(ids, cache, last_only), self.plan.head)  # of this rank's tokens
        return gather_columns(own, self.group, self.config.vocab_size, self.backend)

    @no_grad()
    def normed(self, ids, cache=None, last_only=False):
        """ids (B, T) -> the final LayerNorm's output (B, T, C), or with last_only its last position, (B, 1, C).

        The attention of the last layer reads all positions; what comes after it is then computed only for the last one.
        The residual stream is x + branch, or x if branch is None; the LayerNorm that reads it computes the sum.
        """
        position, branch = cache.length if cache else 0, None
        x = self.embedding(ids, position)
        for layer, (attention, mlp) in enumerate(self.plan.layers):
            x, y = self.normalize(x, branch, attention.norm)
            branch = None  # its memory is used again
            branch = self.attention(y, attention, layer, cache, position)
            if last_only and layer == self.config.n_layer - 1:
                (a, bias), x = branch, x[:, -1:]
                branch = a[:, -1:], bias
            x, y = self.normalize(x, branch, mlp.norm)
            branch = None
            branch = self.mlp(y, mlp)
        return self.normalize(x, branch, self.plan.norm)[1]

    def embedding(self, ids, position):
        """ids (B, T) from `position` on -> (B, T, C)."""
        (wte, wpe), group = self.plan[:2], self.group
        checks.embedding(self.backend, ids, wte, wpe, position, self.vocabulary)
        added = wpe if group.is_root else None  # on one rank, or the sum would contain it once for each rank
        x = self.backend.embedding_forward(ids, wte, added, position, self.vocabulary.first)
        return group.all_reduce(x, out=x)

    def normalize(self, x, branch, norm):
        """(x + branch, its LayerNorm), each (B, T, C). branch: (a, bias) or None; norm: [weight, bias]."""
        eps = self.config.layer_norm_epsilon
        if branch is None:
            return x, self.backend.layernorm_forward(x, *norm, eps)[0]
        return self.backend.residual_layernorm_forward(x, *branch, *norm, eps)[:2]

    def attention(self, y, sublayer, layer, cache, position):
        """y (B, T, C) -> the branch (a, bias) of attention; a (B, T, C)."""
        qkv = self.backend.linear_forward(y, *sublayer.linear_in)  # (B, T, 3C / group.size)
        if self.plan.rotates:
            qkv = self.backend.rotary_forward(qkv, self.n_head, position)
        attend = self.backend.attention_forward
        a = cache.attend(qkv, layer, self.n_head) if cache else attend(qkv, self.n_head)[0]
        w, bias = sublayer.linear_out
        return self.group.all_reduce(self.backend.linear_forward(a, w, None)), bias  # the bias after the sum over ranks

    def mlp(self, y, sublayer):
        """y (B, T, C) -> the branch (a, bias) of the MLP; a (B, T, C)."""
        w, bias = sublayer.linear_out
        return self.group.all_reduce(self.backend.mlp_forward(y, *sublayer.linear_in, w)[0]), bias
