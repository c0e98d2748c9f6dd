"""A decode step: the kernel launches that compute one more position of every sequence with the KV cache.

SingleRowStep serves one sequence, BatchedStep two or more. run() writes the output of the last LayerNorm to h; the
decoder computes the logits from h.
"""

# B sequences, C channels, H heads; k and v of a layer are cached as (B, block, 2C)
# residual = (x, partials, bias): the residual stream is the sum of x, the partial sums of a product, and the product's
# bias. The next LayerNorm kernel computes this sum.

from stage2_cuda.decoding import batched, single_row


class DecodeStep:
    """Computes h (B, C) at the newest position of every sequence. A subclass defines allocate() and run().

    sequences: a sampling.Sequences; sequences.x has the embeddings of the newest tokens. cache: an array (B, block, 2C)
    for each layer. tiling: a batched.DecodeTiling. empty(shape, dtype) allocates an array.
    """

    prepare = None  # a method to call before the first run() of each generation, or None

    def __init__(self, model, sequences, cache, h, tiling, empty):
        self.model, self.config = model, model.config
        self.sequences, self.cache, self.h, self.tiling = sequences, cache, h, tiling
        self.layers = [LayerWeights(model.parameters, f"transformer.h.{i}.") for i in range(self.config.n_layer)]
        self.ln_f = weight_and_bias(model.parameters, "transformer.ln_f")
        self.allocate(h.dtype, empty)


class BatchedStep(DecodeStep):
    def allocate(self, dtype, empty):
        B, C = self.h.shape
        self.q, self.y, self.g = empty((B, C), dtype), empty((B, C), dtype), empty((B, 4 * C), dtype)
        self.s = empty((B, C), "float32")
        parts = [batched.split_k(K, self.tiling).parts for K in (C, 4 * C)]
        self.attention_partials, self.mlp_partials = (empty((count, B, C), "float32") for count in parts)

    def run(self):
        lengths, tiling, precision = self.sequences.lengths, self.tiling, self.model.head.backend.dot_precision
        block, n_head, residual = self.config.block_size, self.config.n_head, (self.sequences.x, None, None)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            x = self.add_and_normalize(residual, layer.ln_1)
            batched.linear(self.q, cache, self.h, *layer.qkv, lengths, block, tiling, precision)
            batched.attention(self.y, self.q, cache, lengths, n_head, tiling)
            batched.split_k_product(self.attention_partials, self.y, layer.proj[0], tiling, precision)
            x = self.add_and_normalize((x, self.attention_partials, layer.proj[1]), layer.ln_2)
            batched.linear(self.g, None, self.h, *layer.fc, lengths, block, tiling, precision)
            batched.split_k_product(self.mlp_partials, self.g, layer.fc_proj[0], tiling, precision)
            residual = x, self.mlp_partials, layer.fc_proj[1]
        batched.layernorm(self.h, None, residual, *self.ln_f, self.config.layer_norm_epsilon, tiling)

    def add_and_normalize(self, residual, ln):
        """h = LN(sum of residual); returns the array of the sum: x itself if there are no partial sums, else self.s."""
        x, partials, _ = residual
        s = x if partials is None else self.s
        batched.layernorm(self.h, s, residual, *ln, self.config.layer_norm_epsilon, self.tiling)
        return s


class SingleRowStep(DecodeStep):
    """The step for one sequence. prepare() transposes most weights, once per generation; run() reads these copies."""

    def allocate(self, dtype, empty):
        C, H, D = self.config.n_embd, self.config.n_head, self.config.n_embd // self.config.n_head
        self.q, self.g = empty((1, C), dtype), empty((1, 4 * C), dtype)
        self.s, self.x = empty((1, C), "float32"), empty((1, C), "float32")
        splits = single_row.key_splits(self.config.block_size, self.tiling)
        self.splits = empty((H, splits, D), "float32"), empty((H, splits), "float32"), empty((H, splits), "float32")
        self.attention_partials = empty((single_row.split_heads(H, D, self.tiling)[0], 1, C), "float32")
        self.transposed = [TransposedWeights(layer, dtype, empty) for layer in self.layers]

    def prepare(self):
        for weights in self.transposed:
            weights.update()

    def run(self):
        lengths, tiling, x = self.sequences.lengths, self.tiling, self.sequences.x
        block, n_head, eps = self.config.block_size, self.config.n_head, self.config.layer_norm_epsilon
        common = lengths, block, eps, tiling  # the last arguments of both calls of layernorm_linear
        for layer, t, cache in zip(self.layers, self.transposed, self.cache, strict=True):
            residual = x, None, None
            single_row.layernorm_linear(self.q, cache, None, residual, layer.ln_1[0], t.qkv, *t.qkv_ln, *common)
            single_row.split_keys_attention(*self.splits, self.q, cache, lengths, n_head, tiling)
            single_row.combine_product(self.attention_partials, *self.splits, lengths, layer.proj[0], block, tiling)
            residual = x, self.attention_partials, layer.proj[1]
            single_row.layernorm_linear(self.g, None, self.s, residual, layer.ln_2[0], t.fc, *t.fc_ln, *common)
            x = self.x
            single_row.linear_residual(x, self.s, self.g, t.fc_proj, layer.fc_proj[1], tiling)
        batched.layernorm(self.h, None, (x, None, None), *self.ln_f, eps, tiling)


class LayerWeights:
    """The [weight, bias] arrays of one layer, whose parameter names start with `prefix`, such as "transformer.h.0."."""

    def __init__(self, parameters, prefix):
        self.ln_1, self.ln_2 = (weight_and_bias(parameters, f"{prefix}{part}") for part in ("ln_1", "ln_2"))
        self.qkv = weight_and_bias(parameters, f"{prefix}attn.c_attn")
        self.proj = weight_and_bias(parameters, f"{prefix}attn.c_proj")
        self.fc, self.fc_proj = (weight_and_bias(parameters, f"{prefix}mlp.{part}") for part in ("c_fc", "c_proj"))


class TransposedWeights:
    """Copies of the weights of one layer for single_row.py: the transposed weights qkv, fc and fc_proj.

    qkv_ln, fc_ln: [gamma_w, beta_w] of single_row.fold_layernorm, for the LayerNorm before qkv and before fc.
    """

    def __init__(self, layer, dtype, empty):
        self.layer = layer
        weights = layer.qkv[0], layer.fc[0], layer.fc_proj[0]
        self.qkv, self.fc, self.fc_proj = (empty(weight.shape[::-1], dtype) for weight in weights)
        self.qkv_ln, self.fc_ln = ([empty((len(w),), "float32") for _ in range(2)] for w in (self.qkv, self.fc))

    def update(self):
        """Compute the copies from the current weights: training may have changed these in place."""
        layer = self.layer
        single_row.transpose(self.qkv, layer.qkv[0])
        single_row.fold_layernorm(*self.qkv_ln, self.qkv, *layer.ln_1, layer.qkv[1])
        single_row.transpose(self.fc, layer.fc[0])
        single_row.transpose(self.fc_proj, layer.fc_proj[0])
        # This launch is the last one: the first kernel of run() loads qkv before it waits for the previous kernel
        # (pdl), so the previous kernel must not write qkv.
        single_row.fold_layernorm(*self.fc_ln, self.fc, *layer.ln_2, layer.fc[1])


def weight_and_bias(parameters, name):
    return [parameters[f"{name}.{kind}"].data for kind in ("weight", "bias")]
