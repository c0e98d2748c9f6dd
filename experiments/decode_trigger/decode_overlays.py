"""Variants of the decode step: copies of stage2_cuda of two trees, with text replacements."""

import shutil
from pathlib import Path

BATCHED, SINGLE = "stage2_cuda/decoding/batched.py", "stage2_cuda/decoding/single_row.py"
IMPORT = "from triton.language.extra.cuda import gdc_wait\n"
ATTENTION = "wait_for_previous_launch()  # faster here than to allow the next kernel to start before the wait\n"
LINEAR = "        trigger_and_wait(w[CHUNKS - 1])\n    position"


def replace(files, path, old, new, count=1):
    assert files[path].count(old) == count, (path, old, files[path].count(old))
    files[path] = files[path].replace(old, new)


def no_trigger(files):
    text = files[SINGLE]
    for tile in ("w[CHUNKS - 1]", "w"):
        text = text.replace(f"        trigger_and_wait({tile})\n", "        wait_for_previous_launch()\n")
    assert text != files[SINGLE]
    files[SINGLE] = text


def no_policy(files):
    replace(files, SINGLE, ', eviction_policy=READ_ONCE if ONCE else ""', "")
    replace(files, SINGLE, ", eviction_policy=READ_ONCE", "")
    replace(files, BATCHED, ", eviction_policy=READ_ONCE", "")


def attention_at_once(files):
    """Attention allows the next kernel to start before it waits, without waiting for its keys and values."""
    replace(files, SINGLE, IMPORT, IMPORT.replace("import ", "import gdc_launch_dependents, "))
    replace(files, SINGLE, ATTENTION, "gdc_launch_dependents()\n        gdc_wait()\n")


def attention_with_values(files):
    """Attention allows the next kernel to start when its values have arrived, before it waits."""
    replace(files, SINGLE, ATTENTION, "trigger_and_wait(v)\n")


def qkv_waits_first(files):
    """The product before attention allows attention to start only after its wait; attention as attention_with_values."""
    attention_with_values(files)
    replace(files, SINGLE, LINEAR, "        if cache_ptr is not None:\n            wait_for_previous_launch()\n"
            "        else:\n            trigger_and_wait(w[CHUNKS - 1])\n    position")  # fmt: skip


def layernorm_early(files):
    """The last LayerNorm allows the unembedding to start before it waits."""
    old = "        wait_for_previous_launch()\n    s = add_partials"
    new = "        if PARTS == 0 and s_ptr is None:\n            gdc_launch_dependents()\n            gdc_wait()\n        else:\n    " + old
    replace(files, BATCHED, old, new.replace("    s = add", "    s = add"))


def small_programs(files):
    """Programs of 4 warps with half as many columns (with block_n 16), so that more of them fit."""
    replace(files, SINGLE, "WARPS = 8 ", "WARPS = 4 ")
    replace(files, SINGLE, "48 << 10", "24 << 10")


UNEMBED = '''    if BLOCK_B == 1:
        k = tl.arange(0, 256)
        acc, w = tl.zeros((BLOCK_N, 256), tl.float32), ()
        for c in tl.static_range((BLOCK_K + 255) // 256):
            if c * 256 < WIDTH:
                w_mask = (v < V)[:, None] & (k + c * 256 < K)[None, :]
                w += (tl.load(w_ptr + w_offs + k[None, :] + c * 256, w_mask, 0, eviction_policy=READ_ONCE),)
        if PDL:
            wait_for_previous_launch()
        # h is loaded as BLOCK_N equal rows: each warp loads all of h, and no data moves between warps
        h = ()
        for c in tl.static_range((BLOCK_K + 255) // 256):
            if c * 256 < WIDTH:
                h += (tl.load(h_ptr + 0 * v[:, None] + k[None, :] + c * 256, (k + c * 256 < K)[None, :] & (v >= 0)[:, None], 0),)
        for c in tl.static_range((BLOCK_K + 255) // 256):
            if c * 256 < WIDTH:
                acc += w[c].to(tl.float32) * h[c].to(tl.float32)
        acc = tl.sum(acc, 1)[None, :]
    else:
'''


def unembed_rows(files):
    """Each warp of the unembedding computes whole logits (with 8 warps and 8 rows, one each)."""
    text = files[BATCHED]
    i = text.index("    if BLOCK_B == 1:\n        k = tl.arange(0, BLOCK_K)\n")
    j = text.index("    else:\n", i)
    files[BATCHED] = text[:i] + UNEMBED + text[j + len("    else:\n"):]
    replace(files, BATCHED, "    logits_ptr, maxima_ptr, indices_ptr, h_ptr, w_ptr, B, K, V, tiles,\n    BLOCK_B: tl.constexpr,",
            "    logits_ptr, maxima_ptr, indices_ptr, h_ptr, w_ptr, B, K, V, tiles,\n    WIDTH: tl.constexpr, BLOCK_B: tl.constexpr,")
    replace(files, BATCHED, "options = dict(BLOCK_B=padded_batch(B), BLOCK_K=k_per_iteration,",
            "options = dict(WIDTH=K, BLOCK_B=padded_batch(B), BLOCK_K=k_per_iteration,")
    replace(files, BATCHED, "    launch_tiled(unembed_kernel,", '    if B == 1:\n        options["num_warps"] = UNEMBED_WARPS\n    launch_tiled(unembed_kernel,')
    replace(files, BATCHED, "MAX_BATCH = 32", "UNEMBED_WARPS = 8\nMAX_BATCH = 32")


ROWS = '''
@triton.jit
def add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f

@triton.jit
def layernorm_linear_kernel(
    y_ptr, cache_ptr, s_ptr, x_ptr, partials_ptr, bias_ptr, ln_w_ptr, w_ptr, gamma_w_ptr, beta_w_ptr, lengths_ptr,
    block, inverse_K, eps, K, N,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = BLOCK_N // WARPS_PER_PROGRAM
    W: tl.constexpr = WARPS_PER_PROGRAM
    k, warp = tl.arange(0, CHUNK), tl.arange(0, W)
    cols = tl.program_id(0) * BLOCK_N + warp[:, None] * R + tl.arange(0, R)[None, :]  # (W, R)
    w, ln_w, bias = (), (), ()
    for c in tl.static_range(CHUNKS):
        mask = (cols < N)[:, :, None] & (k + c * CHUNK < K)[None, None, :]
        w += (tl.load(w_ptr + cols[:, :, None] * K + (k + c * CHUNK)[None, None, :], mask, 0, eviction_policy=READ_ONCE),)
    rows = 0 * warp[:, None] + k[None, :]  # (W, CHUNK): each warp loads all of k
    for c in tl.static_range(CHUNKS):
        ln_w += (tl.load(ln_w_ptr + rows + c * CHUNK, rows + c * CHUNK < K, 0),)
    gamma_w, beta_w = tl.load(gamma_w_ptr + cols, cols < N, 0), tl.load(beta_w_ptr + cols, cols < N, 0)
    if partials_ptr is not None:
        bias = load_row(bias_ptr, K, CHUNKS, CHUNK)
    if PDL:
        trigger_and_wait(w[CHUNKS - 1])
    position = newest_positions(lengths_ptr, 1, block, 1) if cache_ptr is not None else 0
    x = ()
    if partials_ptr is not None:
        x = load_row(x_ptr, K, CHUNKS, CHUNK)
        for part in tl.static_range(PARTS):
            x = add_rows(x, load_row(partials_ptr + part * K, K, CHUNKS, CHUNK), CHUNKS)
        x = add_rows(x, bias, CHUNKS)
        if s_ptr is not None:
            if tl.program_id(0) == 0:
                for c in tl.static_range(CHUNKS):
                    tl.store(s_ptr + k + c * CHUNK, x[c], k + c * CHUNK < K)
    else:
        quad = warp[None, :, None] * 0 + 8 * tl.arange(0, CHUNK // 8)[:, None, None] + tl.arange(0, 4)[None, None, :]
        for c in tl.static_range(CHUNKS):
            low = tl.load(x_ptr + quad + c * CHUNK, quad + c * CHUNK < K, 0)
            high = tl.load(x_ptr + quad + c * CHUNK + 4, quad + c * CHUNK + 4 < K, 0)
            x += (tl.reshape(tl.permute(tl.join(low, high), (1, 0, 3, 2)), (W, CHUNK)),)
            if s_ptr is not None:
                tl.store(s_ptr + rows + c * CHUNK, x[c], (rows + c * CHUNK < K) & (warp == tl.program_id(0))[:, None])
    product = tl.zeros((W, R, CHUNK), tl.float32)
    if partials_ptr is not None:
        total, squares = tl.zeros((W, R, CHUNK), tl.float32), tl.zeros((W, R, CHUNK), tl.float32)
        for c in tl.static_range(CHUNKS):
            row = tl.broadcast_to(x[c][None, None, :], (W, R, CHUNK))
            total += row
            squares += row * row
            product += w[c].to(tl.float32) * (row * ln_w[c].to(tl.float32)[:, None, :])
        value, mean, mean_square = tl.reduce((product, total * inverse_K, squares * inverse_K), 2, add_triples)
        rstd = 1 / tl.sqrt(tl.maximum(mean_square - mean * mean, 0) + eps)
        value = (value - mean * gamma_w) * rstd + beta_w
    else:
        total, squares = tl.zeros((W, CHUNK), tl.float32), tl.zeros((W, CHUNK), tl.float32)
        for c in tl.static_range(CHUNKS):
            total += x[c]
            squares += x[c] * x[c]
            product += w[c].to(tl.float32) * (x[c] * ln_w[c].to(tl.float32))[:, None, :]
        value = tl.sum(product, 2)
        mean, mean_square = tl.reduce((total * inverse_K, squares * inverse_K), 1, add_pairs)
        rstd = 1 / tl.sqrt(tl.maximum(mean_square - mean * mean, 0) + eps)
        value = (value - mean[:, None] * gamma_w) * rstd[:, None] + beta_w
    if cache_ptr is not None:
        tl.store(y_ptr + cols, value, cols < K)
        tl.store(cache_ptr + position * (2 * K) + cols - K, value, (cols >= K) & (cols < N))
    else:
        tl.store(y_ptr + cols, value * sigmoid_of_2u(value), cols < N)


@triton.jit
def linear_residual_kernel('''


def warp_statistics(files):
    """layernorm_linear: each warp computes the statistics of x itself; without partial sums it loads all of x itself."""
    text = files[SINGLE]
    start, end = "\n@triton.jit\ndef layernorm_linear_kernel(", "\n@triton.jit\ndef linear_residual_kernel("
    i, j = text.index(start), text.index(end)
    text = text[:i] + ROWS + text[j + len(end):]
    files[SINGLE] = text
    replace(files, SINGLE, "CHUNK_BYTES = 512", "WARPS_PER_PROGRAM = tl.constexpr(WARPS)\nCHUNK_BYTES = 512")


FAST = [warp_statistics, unembed_rows, layernorm_early]
VARIANTS = {  # name: (tree, changes, fields of DecodeTiling)
    "base 2dc3cd2": ("base", [], {}),
    "committed: evict first, trigger": ("new", [], {}),
    "evict first only (main)": ("new", [no_trigger], {}),
    "trigger only": ("new", [no_policy], {}),
    "attention triggers at once": ("new", [attention_at_once], {}),
    "attention triggers with its values": ("new", [attention_with_values], {}),
    "same, but qkv waits first": ("new", [qkv_waits_first], {}),
    "last LayerNorm triggers first": ("new", [layernorm_early], {}),
    "columns 16": ("new", [], {"block_n": 16}),
    "columns 16, 4 warps": ("new", [small_programs], {"block_n": 16}),
    "statistics in each warp": ("new", [warp_statistics], {}),
    "unembed, rows in warps": ("new", [unembed_rows], {}),
    "vocab 4": ("new", [], {"block_vocab": 4}),
    "combine with 8 warps": ("new", [], {"elements_per_thread": 64}),
    "statistics, unembed, LayerNorm": ("new", FAST, {}),
    "same, columns 16": ("new", FAST, {"block_n": 16}),
    "same, columns 16, 4 warps": ("new", [small_programs, *FAST], {"block_n": 16}),
}


def make(trees, target, name):
    """Write the variant `name` to the directory target; returns the fields of DecodeTiling."""
    tree, changes, fields = VARIANTS[name]
    shutil.copytree(Path(trees) / tree, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path: (Path(target) / path).read_text() for path in (BATCHED, SINGLE)}
    for change in changes:
        change(files)
    for path, text in files.items():
        (Path(target) / path).write_text(text)
    return fields
