"""A decode step: the kernel launches that compute one more position of every sequence with the KV cache.

BatchedStep serves two or more sequences, and SingleRowStep one. ClusterStep serves 1 to 16 sequences with fewer
launches, on the GPUs and for the models that it supports.
"""

# B sequences, C channels, H heads; k and v of a layer are cached as (B, block, 2C): position i at index i % block
# residual = (x, partials, bias): the residual stream is the sum of x, the partial sums of a product, and the product's
# bias. The next LayerNorm kernel computes this sum.

from stage2_cuda.decoding import batched, cluster_step, single_row

OPERATIONS = "attention", "gelu"  # of a Plan, for each of which a DecodeStep has a method of this name


class DecodeStep:
    """Computes h (B, C) or the logits at the newest position of every sequence.

    config: a GPT2Config; plan: an architecture.Plan. sequences: a sampling.Sequences; sequences.x has the embeddings of
    the newest tokens. cache: an array (B, block, 2C) for each layer. logits (B, V) float32. tiling: a
    batched.DecodeTiling. precision: how tl.dot multiplies float32. empty(shape, dtype) allocates an array.

    A subclass defines allocate(), and a method for each of OPERATIONS, which launches the kernels of a sublayer: (the
    residual before it, the PlannedSublayer, the cache of its layer) -> the residual after it. self.layers has the
    PlannedSublayers of each layer; allocate() may replace them by TransposedSublayers.
    """

    prepare = None  # a method to call before the first run() of each generation, or None

    def __init__(self, config, plan, sequences, cache, h, logits, tiling, precision, empty):
        self.config, self.plan, self.layers, self.precision = config, plan, plan.layers, precision
        self.sequences, self.cache, self.h, self.logits, self.tiling = sequences, cache, h, logits, tiling
        self.eps = config.layer_norm_epsilon
        # what the product before attention stores for attention: q, or q and the new k if attention rotates them
        self.q_columns = (2 if plan.rotates else 1) * config.n_embd
        self.allocate(h.dtype, empty)

    def run(self):
        """Launch the kernels of a step. Returns the result of finish()."""
        residual = self.sequences.x, None, None
        for layer, cache in zip(self.layers, self.cache, strict=True):
            for each in layer:
                residual = getattr(self, each.operation)(residual, each, cache)
        return self.finish(residual)

    def finish(self, residual):
        """Compute h and return None. Or store `logits` and return (maxima, indices), as GpuDecoder.unembed() does."""
        batched.layernorm(self.h, None, residual, *self.plan.norm, self.eps, self.tiling)


class BatchedStep(DecodeStep):
    def allocate(self, dtype, empty):
        B, C = self.h.shape
        self.q, self.y, self.g = (empty((B, columns), dtype) for columns in (self.q_columns, C, 4 * C))
        self.s = empty((B, C), "float32")
        parts = [batched.split_k(K, self.tiling).parts for K in (C, 4 * C)]
        self.attention_partials, self.mlp_partials = (empty((count, B, C), "float32") for count in parts)

    def attention(self, residual, sublayer, cache):
        x = self.add_and_normalize(residual, sublayer.norm)
        self.linear(self.q, cache, sublayer.linear_in)
        lengths, n_head, rotation = self.sequences.lengths, self.config.n_head, self.sequences.rotation
        batched.attention(self.y, self.q, cache, lengths, n_head, self.tiling, rotation)
        return self.product(x, self.attention_partials, self.y, sublayer.linear_out)

    def gelu(self, residual, sublayer, cache):
        x = self.add_and_normalize(residual, sublayer.norm)
        self.linear(self.g, None, sublayer.linear_in)
        return self.product(x, self.mlp_partials, self.g, sublayer.linear_out)

    def add_and_normalize(self, residual, norm):
        """h = LN(sum of residual); returns the array of the sum: x itself if there are no partial sums, else self.s."""
        x, partials, _ = residual
        s = x if partials is None else self.s
        batched.layernorm(self.h, s, residual, *norm, self.eps, self.tiling)
        return s

    def linear(self, y, cache, linear):
        lengths, block = self.sequences.lengths, self.config.block_size
        batched.linear(y, cache, self.h, *linear, lengths, block, self.tiling, self.precision)

    def product(self, x, partials, y, linear):
        """partials = partial sums of y w, for linear = (w, bias); returns the residual with x."""
        batched.split_k_product(partials, y, linear[0], self.tiling, self.precision)
        return x, partials, linear[1]


class SingleRowStep(DecodeStep):
    """The step for one sequence. prepare() transposes most weights, once per generation; run() reads these copies."""

    def allocate(self, dtype, empty):
        C, H, D = self.config.n_embd, self.config.n_head, self.config.n_embd // self.config.n_head
        self.q, self.g = empty((1, self.q_columns), dtype), empty((1, 4 * C), dtype)
        self.s, self.x = empty((1, C), "float32"), empty((1, C), "float32")
        splits = single_row.key_splits(self.config.block_size, self.tiling)
        self.splits = empty((H, splits, D), "float32"), empty((H, splits), "float32"), empty((H, splits), "float32")
        self.attention_partials = empty((single_row.split_heads(H, D, self.tiling)[0], 1, C), "float32")
        self.layers = [
            [TransposedSublayer(each, dtype, empty, each.operation == "gelu") for each in layer]
            for layer in self.plan.layers
        ]

    def prepare(self):
        for layer in self.layers:
            update(layer)

    def attention(self, residual, sublayer, cache):
        lengths, n_head, tiling = self.sequences.lengths, self.config.n_head, self.tiling
        product = sublayer.w_out, self.config.block_size, tiling
        self.layernorm_linear(self.q, cache, None, residual, sublayer)
        rotation = self.sequences.rotation
        single_row.split_keys_attention(*self.splits, self.q, cache, lengths, n_head, tiling, rotation)
        single_row.combine_product(self.attention_partials, *self.splits, lengths, *product)
        return residual[0], self.attention_partials, sublayer.bias

    def gelu(self, residual, sublayer, cache):
        self.layernorm_linear(self.g, None, self.s, residual, sublayer)
        single_row.linear_residual(self.x, self.s, self.g, sublayer.w_out, sublayer.bias, self.tiling)
        return self.x, None, None

    def layernorm_linear(self, y, cache, s, residual, sublayer):
        weights = sublayer.ln_w, sublayer.w_in, *sublayer.folded
        common = self.sequences.lengths, self.config.block_size, self.eps, self.tiling
        single_row.layernorm_linear(y, cache, s, residual, *weights, *common)


class ClusterStep(DecodeStep):
    """The step if cluster_step.supports() the model: two kernels per layer, and for one sequence one for the logits."""

    def allocate(self, dtype, empty):
        (B, C), H = self.h.shape, self.config.n_head
        self.s, self.x = empty((B, C), "float32"), empty((B, C), "float32")
        self.attention_partials = empty((H, B, C), "float32")
        self.mlp_partials = empty((cluster_step.mlp_clusters(C), B, C), "float32")
        count = cluster_step.logit_maxima()
        self.maxima, self.indices = empty((1, count), "float32"), empty((1, count), "int32")
        self.layers = [[TransposedSublayer(each, dtype, empty) for each in layer] for layer in self.plan.layers]
        sublayers = [each for layer in self.layers for each in layer]
        weights = [(each.w_in, each.w_out) for each in sublayers]
        self.first_weights = *weights[0], *weights[1]
        # of each kernel: the weights of the kernel after the next one
        ahead = [*weights[2:], *cluster_step.parts_of_head(self.plan.head)]
        self.ahead = dict(zip(sublayers, ahead, strict=True))

    prepare = SingleRowStep.prepare

    def attention(self, residual, sublayer, cache):
        weights = sublayer.ln_w, sublayer.w_in, sublayer.folded, sublayer.w_out
        position, ahead = (self.sequences.lengths, self.sequences.rotation), self.ahead[sublayer]
        # The first kernel may not start before the previous step has ended, because it loads k, v and the length.
        overlap = sublayer is not self.layers[0][0]
        cluster_step.attention_block(
            self.attention_partials, self.s, cache, residual, *weights, *position, ahead, self.eps, overlap
        )
        return self.s, self.attention_partials, sublayer.bias

    def gelu(self, residual, sublayer, cache):
        weights = sublayer.ln_w, sublayer.w_in, sublayer.folded, sublayer.w_out
        cluster_step.mlp_block(self.mlp_partials, self.x, residual, *weights, self.ahead[sublayer], self.eps)
        return self.x, self.mlp_partials, sublayer.bias

    def finish(self, residual):
        if len(self.h) > 1:
            return super().finish(residual)
        outputs, weights = (
            (self.logits[0], self.maxima[0], self.indices[0], self.s[0]),
            (self.plan.norm, self.plan.head),
        )
        cluster_step.logits(*outputs, residual, *weights, self.first_weights, self.eps)
        return self.maxima, self.indices


class TransposedSublayer:
    """A PlannedSublayer for SingleRowStep or ClusterStep, with copies of its weights that update() computes.

    ln_w (C): the weight of the norm. w_in (N, C): the weight of linear_in, transposed. folded: [gamma_w, beta_w] (N) of
    single_row.fold_layernorm. w_out, bias: of linear_out; w_out is a transposed copy if `transpose_out`.
    """

    def __init__(self, sublayer, dtype, empty, transpose_out=True):
        self.sublayer, self.operation, self.ln_w = sublayer, sublayer.operation, sublayer.norm[0]
        (w_in, _), (w_out, self.bias) = sublayer.linear_in, sublayer.linear_out
        self.w_in, self.w_out = empty(w_in.shape[::-1], dtype), w_out
        self.transposed = [(self.w_in, w_in)]  # pairs (copy, weight)
        if transpose_out:
            self.w_out = empty(w_out.shape[::-1], dtype)
            self.transposed.append((self.w_out, w_out))
        self.folded = [empty(self.w_in.shape[:1], "float32") for _ in range(2)]


def update(layer):
    """Compute the copies of a layer's TransposedSublayers from the current weights: training may have changed these."""
    single_row.transpose([pair for each in layer for pair in each.transposed])
    # These launches are the last ones: the first kernel of run() loads the copies of the first sublayer before it waits
    # for the previous kernel (pdl), so the previous kernel, which is that of the last sublayer, must not write them.
    for each in layer:
        single_row.fold_layernorm(*each.folded, each.w_in, *each.sublayer.norm, each.sublayer.linear_in[1])
