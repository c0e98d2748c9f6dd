"""One more position of every sequence, through all layers, over a cache: which kernels, in which order, with what.

OneRow and ManyRows do the same for one sequence and for more: step() leaves what the last LayerNorm gives in h.
"""

# B sequences, C channels, H heads; k and v of a layer are cached as (B, block, 2C)

from stage2_cuda.decoding import batched as decode
from stage2_cuda.decoding import single_row as decode_row


class Rows:
    """h (B, C) of the newest position of every sequence, whose embeddings are in sequences.x.

    cache: an array (B, block, 2C) for each layer; empty(shape, dtype) makes an array.
    """

    refresh = None  # what is to be done before the first step() of a text, if anything

    def __init__(self, model, sequences, cache, h, tiles, empty):
        self.model, self.config = model, model.config
        self.sequences, self.cache, self.h, self.tiles = sequences, cache, h, tiles
        self.layers = [Layer(model.parameters, f"transformer.h.{layer}.") for layer in range(self.config.n_layer)]
        self.final = pair(model.parameters, "transformer.ln_f")
        self.allocate(h.dtype, empty)


class ManyRows(Rows):
    def allocate(self, kind, empty):
        B, C = self.h.shape
        self.q, self.y, self.g = empty((B, C), kind), empty((B, C), kind), empty((B, 4 * C), kind)
        self.s = empty((B, C), "float32")
        parts = [decode.split(K, self.tiles).parts for K in (C, 4 * C)]
        self.after_attention, self.after_mlp = (empty((count, B, C), "float32") for count in parts)

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


class OneRow(Rows):
    """One sequence, with transposed copies of most weights: what they are at refresh() holds for all of a text."""

    def allocate(self, kind, empty):
        C, H, D = self.config.n_embd, self.config.n_head, self.config.n_embd // self.config.n_head
        self.q, self.g = empty((1, C), kind), empty((1, 4 * C), kind)
        self.s, self.x = empty((1, C), "float32"), empty((1, C), "float32")
        spans = decode_row.spans(self.config.block_size, self.tiles)
        self.spans = empty((H, spans, D), "float32"), empty((H, spans), "float32"), empty((H, spans), "float32")
        self.after_attention = empty((decode_row.heads_of(H, D, self.tiles)[0], 1, C), "float32")
        self.transposed = [Transposed(layer, kind, empty) for layer in self.layers]

    def refresh(self):
        for each in self.transposed:
            each.refresh()

    def step(self):
        lengths, tiles, x = self.sequences.lengths, self.tiles, self.sequences.x
        block, n_head, eps = self.config.block_size, self.config.n_head, self.config.layer_norm_epsilon
        rest = lengths, block, eps, tiles
        for layer, own, cache in zip(self.layers, self.transposed, self.cache, strict=True):
            stream = x, None, None
            decode_row.normed_row(self.q, cache, None, stream, layer.ln_1[0], own.qkv, *own.of_qkv, *rest)
            decode_row.attend_spans(*self.spans, self.q, cache, lengths, n_head, tiles)
            decode_row.joined_product(self.after_attention, *self.spans, lengths, layer.proj[0], block, tiles)
            stream = x, self.after_attention, layer.proj[1]
            decode_row.normed_row(self.g, None, self.s, stream, layer.ln_2[0], own.fc, *own.of_fc, *rest)
            x = self.x
            decode_row.added_row(x, self.s, self.g, own.fc_proj, layer.fc_proj[1], tiles)
        decode.norm(self.h, None, (x, None, None), *self.final, eps, tiles)


class Layer:
    """The arrays of one layer, as the kernels take them."""

    def __init__(self, parameters, name):
        self.ln_1, self.ln_2 = pair(parameters, f"{name}ln_1"), pair(parameters, f"{name}ln_2")
        self.qkv, self.proj = pair(parameters, f"{name}attn.c_attn"), pair(parameters, f"{name}attn.c_proj")
        self.fc, self.fc_proj = pair(parameters, f"{name}mlp.c_fc"), pair(parameters, f"{name}mlp.c_proj")


class Transposed:
    """What decode_row takes of a layer's weights in another form: a column in one piece, and sums of columns."""

    def __init__(self, layer, kind, empty):
        self.layer = layer
        weights = layer.qkv[0], layer.fc[0], layer.fc_proj[0]
        self.qkv, self.fc, self.fc_proj = (empty(weight.shape[::-1], kind) for weight in weights)
        self.of_qkv, self.of_fc = ([empty((len(each),), "float32") for _ in range(2)] for each in (self.qkv, self.fc))

    def refresh(self):
        layer = self.layer
        decode_row.transpose(self.qkv, layer.qkv[0])
        decode_row.sums_of_columns(*self.of_qkv, self.qkv, *layer.ln_1, layer.qkv[1])
        decode_row.transpose(self.fc, layer.fc[0])
        decode_row.transpose(self.fc_proj, layer.fc_proj[0])
        # last, because step() begins with qkv, and reads it before it waits for anything
        decode_row.sums_of_columns(*self.of_fc, self.fc, *layer.ln_2, layer.fc[1])


def pair(parameters, name):
    return [parameters[f"{name}.{kind}"].data for kind in ("weight", "bias")]
