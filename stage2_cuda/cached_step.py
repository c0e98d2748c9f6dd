"""One more position of every sequence, through all layers, over a cache: which kernels, in which order, with what.

OneRow and ManyRows do the same for a number of sequences that is one, or more. Their step() leaves the last LayerNorm's
result in h, and refresh() is what is to be done when weights may have changed, before the first step of a text.
"""

# B sequences, C channels, H heads; k and v of a layer are cached as (B, block, 2C)

from stage2_cuda.kernels import decode, decode_row


class ManyRows:
    """h (B, C) of the newest position of every sequence, whose embeddings are in sequences.x."""

    def __init__(self, model, sequences, cache, h, tiles, empty):
        self.model, self.config = model, model.config
        self.sequences, self.cache, self.h, self.tiles = sequences, cache, h, tiles
        self.layers = [Layer(model.parameters, f"transformer.h.{layer}.") for layer in range(self.config.n_layer)]
        self.final = pair(model.parameters, "transformer.ln_f")
        self.allocate(h.dtype, empty)

    def allocate(self, kind, empty):
        B, C = self.h.shape
        self.q, self.y, self.g = empty((B, C), kind), empty((B, C), kind), empty((B, 4 * C), kind)
        self.s = empty((B, C), "float32")
        parts = [decode.split(K, self.tiles).parts for K in (C, 4 * C)]
        self.after_attention, self.after_mlp = (empty((count, B, C), "float32") for count in parts)

    def refresh(self):
        """The weights are read where they are."""

    def step(self):
        lengths, tiles, precision = self.sequences.lengths, self.tiles, self.model.head.backend.dot
        block, n_head, stream = self.config.block_size, self.config.n_head, (self.sequences.x, None, None)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            stream = self.normed(stream, layer.ln_1)
            decode.columns(self.q, cache, self.h, *layer.qkv, lengths, block, tiles, precision)
            decode.attend(self.y, self.q, cache, lengths, n_head, tiles)
            decode.partial_product(self.after_attention, self.y, layer.proj[0], tiles, precision)
            stream = self.normed((stream[0], self.after_attention, layer.proj[1]), layer.ln_2)
            decode.columns(self.g, None, self.h, *layer.fc, lengths, block, tiles, precision)
            decode.partial_product(self.after_mlp, self.g, layer.fc_proj[0], tiles, precision)
            stream = stream[0], self.after_mlp, layer.fc_proj[1]
        decode.norm(self.h, None, stream, *self.final, self.config.layer_norm_epsilon, tiles)

    def normed(self, stream, ln):
        """h = LN(stream) -> the stream as one array, its partial sums added."""
        s = stream[0] if stream[1] is None else self.s
        decode.norm(self.h, s, stream, *ln, self.config.layer_norm_epsilon, self.tiles)
        return s, None, None


class OneRow(ManyRows):
    """The same for one sequence, with transposed copies of most weights."""

    def allocate(self, kind, empty):
        C, H, D = self.config.n_embd, self.config.n_head, self.config.n_embd // self.config.n_head
        self.q, self.g = empty((1, C), kind), empty((1, 4 * C), kind)
        self.s, self.x = empty((1, C), "float32"), empty((1, C), "float32")
        spans = decode_row.spans(self.config.block_size, self.tiles)
        self.spans = empty((H, spans, D), "float32"), empty((H, spans), "float32"), empty((H, spans), "float32")
        self.after_attention = empty((decode_row.heads_of(H, D, self.tiles).parts, 1, C), "float32")
        for layer in self.layers:
            layer.qkv_row, layer.fc_row, layer.fc_proj_row = (
                empty(weight.shape[::-1], kind) for weight, _ in (layer.qkv, layer.fc, layer.fc_proj)
            )
            layer.qkv_sums, layer.fc_sums = (
                [empty(bias.shape, "float32") for _ in range(2)] for _, bias in (layer.qkv, layer.fc)
            )

    def refresh(self):
        for layer in self.layers:
            decode_row.transpose(layer.qkv_row, layer.qkv[0])
            decode_row.transpose(layer.fc_row, layer.fc[0])
            decode_row.transpose(layer.fc_proj_row, layer.fc_proj[0])
            decode_row.sums_of_columns(*layer.qkv_sums, layer.qkv_row, *layer.ln_1, layer.qkv[1])
            decode_row.sums_of_columns(*layer.fc_sums, layer.fc_row, *layer.ln_2, layer.fc[1])

    def step(self):
        lengths, tiles, x = self.sequences.lengths, self.tiles, self.sequences.x
        block, n_head, eps = self.config.block_size, self.config.n_head, self.config.layer_norm_epsilon
        rest = lengths, block, eps, tiles
        for layer, cache in zip(self.layers, self.cache, strict=True):
            stream = x, None, None
            decode_row.normed_row(self.q, cache, None, stream, layer.ln_1[0], layer.qkv_row, *layer.qkv_sums, *rest)
            decode_row.attend_spans(*self.spans, self.q, cache, lengths, n_head, tiles)
            decode_row.joined_product(self.after_attention, *self.spans, lengths, layer.proj[0], block, tiles)
            stream = x, self.after_attention, layer.proj[1]
            decode_row.normed_row(self.g, None, self.s, stream, layer.ln_2[0], layer.fc_row, *layer.fc_sums, *rest)
            x = self.x
            decode_row.added_row(x, self.s, self.g, layer.fc_proj_row, layer.fc_proj[1], tiles)
        decode.norm(self.h, None, (x, None, None), *self.final, eps, tiles)


class Layer:
    """The arrays of one layer, as the kernels take them."""

    def __init__(self, parameters, name):
        self.ln_1, self.ln_2 = pair(parameters, f"{name}ln_1"), pair(parameters, f"{name}ln_2")
        self.qkv, self.proj = pair(parameters, f"{name}attn.c_attn"), pair(parameters, f"{name}attn.c_proj")
        self.fc, self.fc_proj = pair(parameters, f"{name}mlp.c_fc"), pair(parameters, f"{name}mlp.c_proj")


def pair(parameters, name):
    return [parameters[f"{name}.{kind}"].data for kind in ("weight", "bias")]
