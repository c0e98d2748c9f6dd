"""The checks of the arguments of ops.py, and of sizes: each raises an error with the values that do not fit together.

The arguments are those of the operation of the same name. Arrays (B, T, ...) of one micro-batch may also be (M, B, T,
...) for M of them, if the backend merges micro-batches.
"""

import numpy as np

from gpt2core.errors import ConfigError, DataError, ShapeError, counted, require_size


def linear(x, w, b):
    require(x.shape[-1] == w.shape[0], "linear", x, w)
    require(b is None or b.shape == w.shape[1:], "linear", w, b)


def mlp(x, w, b, w2):
    require(x.shape[-1] == w.shape[0] and b.shape == w.shape[1:] == w2.shape[:1], "mlp", x, w, b, w2)


def last_axis(operation, x, *vectors):
    """Each of `vectors` has the shape (C) for x (..., C)."""
    require(all(vector.shape == x.shape[-1:] for vector in vectors), operation, x, *vectors)


def residual(operation, x, a, *vectors):
    require(x.shape == a.shape and all(vector.shape == x.shape[-1:] for vector in vectors), operation, x, a, *vectors)


def attention(qkv, n_head):
    axes("attention", qkv.backend, qkv.shape, 3)
    if qkv.shape[-1] % (3 * n_head):
        raise ShapeError(f"attention: qkv {qkv.shape} is not (B, T, 3C) with C divisible by {n_head} heads")


def rotary_attention(x, w, b, n_head):
    axes("rotary_attention", x.backend, x.shape, 3)
    linear(x, w, b)
    if w.shape[1] % (6 * n_head):
        raise ShapeError(f"rotary_attention: w {w.shape} is not (C, 3C) with {n_head} heads of an even size")


def own_tokens(operation, count, vocabulary):
    """`count` is the number of this rank's tokens."""
    if count != vocabulary.count:
        raise ShapeError(
            f"{operation}: this rank has {count} of the {vocabulary.size} tokens, but {vocabulary.count} are its share"
        )


def embedding(backend, ids, wte, wpe, position, vocabulary):
    own_tokens("embedding", wte.shape[0], vocabulary)
    axes("embedding", backend, ids.shape, 2)
    if wpe is not None:
        require(wte.shape[1:] == wpe.shape[1:], "embedding", wte, wpe)
        if not 0 <= position <= wpe.shape[0] - ids.shape[-1]:
            raise ShapeError(f"embedding: ids {ids.shape} from position {position} do not fit {wpe.shape[0]} positions")
    backend.check_tokens("embedding", ids, vocabulary.size)


def unembed(operation, x, w):
    require(x.shape[-1] == w.shape[1], operation, x, w)


def unembed_cross_entropy(x, w, targets, vocabulary):
    own_tokens("unembed_cross_entropy", w.shape[0], vocabulary)
    unembed("unembed_cross_entropy", x, w)
    row_targets("unembed_cross_entropy", x, targets, vocabulary)
    if x.ndim > 3:
        axes("unembed_cross_entropy", x.backend, x.shape, 3)


def cross_entropy(logits, targets, vocabulary):
    own_tokens("cross_entropy", logits.shape[-1], vocabulary)
    row_targets("cross_entropy", logits, targets, vocabulary)


def row_targets(operation, x, targets, vocabulary):
    """`targets` has a token for each row of x (..., K)."""
    if targets.shape != x.shape[:-1]:
        raise ShapeError(f"{operation}: targets {targets.shape} must have one element per row of {x.shape}")
    x.backend.check_tokens(operation, targets, vocabulary.size)


def require(condition, operation, *tensors):
    if not condition:
        raise ShapeError(f"{operation}: shapes {', '.join(str(tensor.shape) for tensor in tensors)} do not fit")


def tokens(operation, array, vocabulary):
    """`array`, on the host, has integers, and no token outside the vocabulary."""
    if not np.issubdtype(array.dtype, np.integer):  # a copy would truncate floats
        raise ShapeError(f"{operation}: tokens have dtype {array.dtype}, but they must be integers")
    if array.size:
        lowest, highest = int(array.min()), int(array.max())
        if lowest < 0 or highest >= vocabulary:
            token = lowest if lowest < 0 else highest
            raise ShapeError(f"{operation}: token {token} is outside the vocabulary of {vocabulary}")


def batch(arrays, shape, vocabulary):
    """Each of `arrays` has tokens of the vocabulary and this shape, (rows, T); returns them as NumPy arrays."""
    arrays = [np.asarray(array) for array in arrays]
    for array in arrays:
        if array.shape != shape:
            raise ShapeError(f"batch: tokens {array.shape}, but the rows of this rank are (rows, T) = {shape}")
        tokens("batch", array, vocabulary)
    return arrays


def windows(tokens, seq_len, order, seed):
    """Windows of seq_len tokens can be cut from the array `tokens`, in this order."""
    if seq_len < 1:
        raise ConfigError(f"seq_len is {seq_len}, but a window needs at least 1 token")
    if order not in ("sequential", "shuffled"):
        raise ConfigError(f"unknown order {order!r}: choose sequential or shuffled")
    if seed < 0:
        raise ConfigError(f"the seed is {seed}, but it must be 0 or more")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"tokens must be one row of integers, but they are {tokens.dtype} of shape {tokens.shape}")
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"the text has {counted(len(tokens), 'token')}, but one sequence of {seq_len} needs {seq_len + 1} "
            "(the last one is a target): give more text or a shorter `seq_len`"
        )


def axes(operation, backend, shape, ndim):
    """`shape` has `ndim` axes, or one more, M, with a backend that merges micro-batches."""
    if len(shape) == ndim + 1 and not backend.merges_micro_batches:
        raise ShapeError(f"{operation}: the {backend.name} backend computes one micro-batch in a call, not {shape}")
    if len(shape) not in (ndim, ndim + 1):
        raise ShapeError(f"{operation}: an array of shape {shape}, but it must have {ndim} axes")


def sizes(config, batch_size, seq_len, micro_batches):
    """The sizes of a batch: whole numbers from 1 on that fit together, and seq_len fits into the block of the model."""
    for name, size in dict(batch_size=batch_size, seq_len=seq_len, micro_batches=micro_batches).items():
        require_size(name, size)
    if seq_len > (longest := config.block_size):
        raise ConfigError(f"`seq_len={seq_len}` exceeds the model's block of {longest} tokens: use `seq_len={longest}`")
    if micro_batches > batch_size:
        raise ConfigError(
            f"`micro_batches={micro_batches}`: a micro-batch needs at least 1 sequence of `batch_size={batch_size}`"
        )


def whole_precision(backend):
    """Kernels read the parameters themselves, not a rounded copy."""
    if backend.compute_dtype != backend.dtype:
        raise ConfigError(f"`precision={backend.precision}` needs a copy of the parameters: use ParallelTrainer")
