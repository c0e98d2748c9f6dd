"""A decode step: the kernel launches that compute one more position of every sequence with the KV cache.

BatchedStep serves two or more sequences. SingleRowStep serves one sequence, and ClusterStep does so with fewer launches
on the GPUs and for the models that it supports.
"""

# B sequences, C channels, H heads; k and v of a layer are cached as (B, block, 2C)
# residual = (x, partials, bias): the residual stream is the sum of x, the partial sums of a product, and the product's
# bias. The next LayerNorm kernel computes this sum.

from stage2_cuda.decoding import batched, cluster_step, single_row


class DecodeStep:
    """Computes h (B, C) or the logits at the newest position of every sequence.

    sequences: a sampling.Sequences; sequences.x has the embeddings of the newest tokens. cache: an array (B, block, 2C)
    for each layer. logits (B, V) float32. tiling: a batched.DecodeTiling. empty(shape, dtype) allocates an array.

    A subclass defines allocate() and run(). run() returns None, and the decoder computes the logits from h. Or run()
    stores `logits` and returns (maxima, indices), as GpuDecoder.unembed() does.
    """

    prepare = None  # a method to call before the first run() of each generation, or None

    def __init__(self, model, sequences, cache, h, logits, tiling, empty):
        self.model, self.config = model, model.config
        self.sequences, self.cache, self.h, self.logits, self.tiling = sequences, cache, h, logits, tiling
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


class ClusterStep(DecodeStep):
    """The step for one sequence if cluster_step.supports() the model: two kernels per layer, and one for the logits."""

    def allocate(self, dtype, empty):
        C, H = self.config.n_embd, self.config.n_head
        self.s, self.x = empty((C,), "float32"), empty((C,), "float32")
        self.attention_partials = empty((H, C), "float32")
        self.mlp_partials = empty((cluster_step.mlp_clusters(C), C), "float32")
        count = cluster_step.logit_maxima()
        self.maxima, self.indices = empty((1, count), "float32"), empty((1, count), "int32")
        self.transposed = [TransposedWeights(layer, dtype, empty, projection=True) for layer in self.layers]

    def prepare(self):
        for weights in self.transposed:
            weights.update()

    def run(self):
        lengths, eps, residual = self.sequences.lengths, self.config.layer_norm_epsilon, (self.sequences.x, None, None)
        for number, (layer, t, cache) in enumerate(zip(self.layers, self.transposed, self.cache, strict=True)):
            ahead_attention, ahead_mlp = self.ahead(number + 1)
            # The first kernel may not start before the previous step has ended, because it loads k, v and the length.
            weights, overlap = (layer.ln_1[0], t.qkv, t.qkv_ln, t.proj), number > 0
            cluster_step.attention_block(
                self.attention_partials, self.s, cache, residual, *weights, lengths, ahead_attention, eps, overlap
            )
            residual = self.s, self.attention_partials, layer.proj[1]
            weights = layer.ln_2[0], t.fc, t.fc_ln, t.fc_proj
            cluster_step.mlp_block(self.mlp_partials, self.x, residual, *weights, ahead_mlp, eps)
            residual = self.x, self.mlp_partials, layer.fc_proj[1]
        t = self.transposed[0]
        first_weights = t.qkv, t.proj, t.fc, t.fc_proj
        outputs = self.logits[0], self.maxima[0], self.indices[0], self.s
        cluster_step.logits(*outputs, residual, self.ln_f, self.model.head.data, first_weights, eps)
        return self.maxima, self.indices

    def ahead(self, number):
        """The weights of the attention kernel and of the MLP kernel of layer `number`, as cluster_step.py expects."""
        if number == len(self.transposed):
            return cluster_step.parts_of_head(self.model.head.data)
        t = self.transposed[number]
        return [(t.qkv, t.proj), (t.fc, t.fc_proj)]


class LayerWeights:
    """The [weight, bias] arrays of one layer, whose parameter names start with `prefix`, such as "transformer.h.0."."""

    def __init__(self, parameters, prefix):
        self.ln_1, self.ln_2 = (weight_and_bias(parameters, f"{prefix}{part}") for part in ("ln_1", "ln_2"))
        self.qkv = weight_and_bias(parameters, f"{prefix}attn.c_attn")
        self.proj = weight_and_bias(parameters, f"{prefix}attn.c_proj")
        self.fc, self.fc_proj = (weight_and_bias(parameters, f"{prefix}mlp.{part}") for part in ("c_fc", "c_proj"))


class TransposedWeights:
    """Copies of the weights of one layer for a step with one sequence: the transposed weights qkv, fc and fc_proj.

    qkv_ln, fc_ln: [gamma_w, beta_w] of single_row.fold_layernorm, for the LayerNorm before qkv and before fc.
    projection: whether there is also a copy of proj.
    """

    def __init__(self, layer, dtype, empty, projection=False):
        self.layer = layer
        weights = layer.qkv[0], layer.fc[0], layer.fc_proj[0]
        self.qkv, self.fc, self.fc_proj = (empty(weight.shape[::-1], dtype) for weight in weights)
        self.proj = empty(layer.proj[0].shape[::-1], dtype) if projection else None
        self.qkv_ln, self.fc_ln = ([empty((len(w),), "float32") for _ in range(2)] for w in (self.qkv, self.fc))

    def update(self):
        """Compute the copies from the current weights: training may have changed these in place."""
        layer = self.layer
        pairs = [(self.qkv, layer.qkv[0]), (self.fc, layer.fc[0]), (self.fc_proj, layer.fc_proj[0])]
        if self.proj is not None:
            pairs.append((self.proj, layer.proj[0]))
        single_row.transpose(pairs)
        single_row.fold_layernorm(*self.qkv_ln, self.qkv, *layer.ln_1, layer.qkv[1])
        # This launch is the last one: the first kernel of run() loads qkv before it waits for the previous kernel
        # (pdl), so the previous kernel must not write qkv.
        single_row.fold_layernorm(*self.fc_ln, self.fc, *layer.ln_2, layer.fc[1])


def weight_and_bias(parameters, name):
    return [parameters[f"{name}.{kind}"].data for kind in ("weight", "bias")]
