"""Variants of the present decode step: copies of stage2_cuda with text replacements."""

import shutil
from pathlib import Path

BATCHED, SINGLE, STEP, DECODER = (f"stage2_cuda/decoding/{n}.py" for n in ("batched", "single_row", "decode_step", "decoder"))

TRIGGER = '''@triton.jit
def trigger_after(tile, PDL: tl.constexpr):
    """Allow the next kernel to start when this thread's part of `tile` has been loaded."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .pred p; xor.b32 t, $4, $5; xor.b32 t, t, $6; xor.b32 t, t, $7; "
            "setp.ne.b32 p, t, 0x5bd1e995; @p griddepcontrol.launch_dependents; "
            "mov.b32 $0, t; mov.b32 $1, t; mov.b32 $2, t; mov.b32 $3, t; }",
            "=r,=r,=r,=r,r,r,r,r", [tile.to(tl.int16, bitcast=True)], dtype=tl.int16, is_pure=False, pack=8,
        )


@triton.jit
def wait_for_previous_launch'''
WAIT = "        wait_for_previous_launch()\n"
ATTENTION_LOADS = "    k, v = tl.load(k_ptrs, mask, 0), tl.load(k_ptrs + C, mask, 0)  # written by earlier steps\n    if PDL:\n"
IMPORT = "from stage2_cuda.decoding.batched import MIN_SCORE, launch_tiled, newest_positions, wait_for_previous_launch\n"


def all_waits(text, new):
    """Only the wait, without the trigger, in all kernels of a file."""
    return text.replace(WAIT, new)


def trigger_on_weights(files, attention=True):
    """A kernel lets the next one start when its own weights have arrived, before it waits for the previous kernel."""
    s = files[SINGLE].replace(IMPORT, IMPORT.replace("newest_positions,", "newest_positions, trigger_after,"))
    s = s.replace("import triton.language as tl\n", "import triton.language as tl\nfrom triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n", 1)
    # layernorm_linear, linear_residual: after the last chunk of the columns; combine: after its tile
    head, linear = s.split("def layernorm_linear_kernel", 1)
    linear, residual = linear.split("def linear_residual_kernel", 1)
    residual, split = residual.split("def split_keys_kernel", 1)
    split, combine = split.split("def combine_product_kernel", 1)
    chunk = "        trigger_after(w[CHUNKS - 1], PDL)\n        gdc_wait()\n"
    linear, residual = linear.replace(WAIT, chunk), residual.replace(WAIT, chunk)
    if attention:
        split = split.replace(WAIT, "        gdc_launch_dependents()\n        gdc_wait()\n")
    combine = combine.replace(WAIT, "        trigger_after(w, PDL)\n        gdc_wait()\n")
    files[SINGLE] = "".join(
        [head, "def layernorm_linear_kernel", linear, "def linear_residual_kernel", residual, "def split_keys_kernel", split,
         "def combine_product_kernel", combine]
    )  # fmt: skip
    files[BATCHED] = files[BATCHED].replace("@triton.jit\ndef wait_for_previous_launch", TRIGGER, 1)


def policies(files, keep):
    """Weights of the first `keep` layers stay in L2 (evict_last); all other weights are evict_first."""
    s = files[SINGLE]
    policy = 'eviction_policy="evict_last" if PDL == 2 else "evict_first"'
    s = s.replace("def load_columns(w_ptr, cols, K, N, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):",
                  "def load_columns(w_ptr, cols, K, N, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr = 0):")
    old = "tiles += (tl.load(w_ptr + cols[:, None] * K + k + c * CHUNK, mask, 0),)"
    new = ("if PDL == 2:\n            tiles += (tl.load(w_ptr + cols[:, None] * K + k + c * CHUNK, mask, 0, eviction_policy=\"evict_last\"),)\n"
           "        elif PDL == 1:\n            tiles += (tl.load(w_ptr + cols[:, None] * K + k + c * CHUNK, mask, 0, eviction_policy=\"evict_first\"),)\n"
           "        else:\n            " + old)
    assert old in s
    s = s.replace(old, new)
    for before in ("w = load_columns(w_ptr, cols, K, N, CHUNKS, CHUNK)  # first", "w, bias = load_columns(w_ptr, cols, K, N, CHUNKS, CHUNK), tl.load(bias_ptr + cols, cols < N, 0).to(tl.float32)\n    if PDL"):
        assert before in s
        s = s.replace(before, before.replace("CHUNKS, CHUNK)", "CHUNKS, CHUNK, PDL)"))
    old = "w = tl.load(w_ptr + (row_heads * SIZE + rows % D)[:, None] * N + cols[None, :], mask, 0)"
    assert old in s
    s = s.replace(old, "if PDL == 2:\n        " + old.replace("mask, 0)", "mask, 0, eviction_policy=\"evict_last\")") +
                  "\n    else:\n        " + old.replace("mask, 0)", "mask, 0, eviction_policy=\"evict_first\")"))
    files[SINGLE] = s
    old = "w = tl.load(w_ptr + w_offs + k[None, :], (v < V)[:, None] & (k < K)[None, :], 0)\n        if PDL"
    assert old in files[BATCHED]
    files[BATCHED] = files[BATCHED].replace(old, old.replace(", 0)\n", ", 0, eviction_policy=\"evict_first\")\n"))
    files[BATCHED] = files[BATCHED].replace("PDL=tiling.pdl, **options", "PDL=int(tiling.pdl), **options")
    old = "        for layer, t, cache in zip(self.layers, self.transposed, self.cache, strict=True):\n            residual"
    assert old in files[STEP]
    files[STEP] = files[STEP].replace(old, f'''        default = tiling
        for number, (layer, t, cache) in enumerate(zip(self.layers, self.transposed, self.cache, strict=True)):
            tiling = default._replace(pdl=2 if number < {keep} else 1)
            common = lengths, block, eps, tiling
            residual''')


def merged_layernorm(files):
    """The unembedding computes the last LayerNorm itself: one launch less."""
    s = files[BATCHED]
    head, rest = s.split("def unembed(logits", 1)
    rest = rest.replace("def unembed(logits", "", 1)
    rest = "def unembed(logits" + rest
    rest = rest.replace("w, tiling, precision):", "w, tiling, precision, ln=None):", 1)
    rest = rest.replace("arguments = logits, maxima, indices, h, w, B, K, V, tiles\n",
                        "arguments = logits, maxima, indices, h, w, *(ln or (None, None)), 1 / K, 1e-5, B, K, V, tiles\n", 1)
    rest = rest.replace("logits_ptr, maxima_ptr, indices_ptr, h_ptr, w_ptr, B, K, V, tiles,",
                        "logits_ptr, maxima_ptr, indices_ptr, h_ptr, w_ptr, ln_w_ptr, ln_b_ptr, inverse_K, eps, B, K, V, tiles,", 1)
    old = "        if PDL:\n            wait_for_previous_launch()\n        h = tl.load(h_ptr + k, k < K, 0).to(tl.float32)\n"
    assert old in rest
    rest = rest.replace(old, '''        if ln_w_ptr is not None:
            ln_w, ln_b = load_vector(ln_w_ptr, K, BLOCK_K), load_vector(ln_b_ptr, K, BLOCK_K)
        if PDL:
            wait_for_previous_launch()
        h = tl.load(h_ptr + k, k < K, 0).to(tl.float32)
        if ln_w_ptr is not None:
            h = normalize(h, ln_w, ln_b, K, inverse_K, eps, BLOCK_K).to(tl.bfloat16).to(tl.float32)
''')
    files[BATCHED] = head + rest
    old = "        batched.layernorm(self.h, None, (x, None, None), *self.ln_f, eps, tiling)\n"
    assert old in files[STEP]
    files[STEP] = files[STEP].replace(old, "")
    old = "        self.decode_step.run()\n        self.unembed()\n"
    assert old in files[DECODER]
    files[DECODER] = files[DECODER].replace(old, '''        self.decode_step.run()
        if self.batch > 1:
            return self.unembed()
        head, step = self.model.head.data, self.decode_step
        arguments = self.logits, self.maxima, self.indices, step.x, head, self.tiling, self.backend.dot_precision
        batched.unembed(*arguments, ln=step.ln_f)
''')


VARIANTS = {
    "base": [],
    "trigger": [trigger_on_weights],
    "trigger, not attention": [lambda files: trigger_on_weights(files, attention=False)],
    "evict first": [lambda files: policies(files, 0)],
    "keep 3": [lambda files: policies(files, 3)],
    "trigger, keep 3": [lambda files: policies(files, 3), trigger_on_weights],
    "merged LN": [merged_layernorm],
    "all": [lambda files: policies(files, 3), trigger_on_weights, merged_layernorm],
}


def make(root, target, name):
    """Write target/stage2_cuda, the variant `name` of root/stage2_cuda."""
    root, target = Path(root), Path(target)
    shutil.copytree(root / "stage2_cuda", target / "stage2_cuda", ignore=shutil.ignore_patterns("__pycache__"))
    files = {path: (root / path).read_text() for path in (BATCHED, SINGLE, STEP, DECODER)}
    for change in VARIANTS[name]:
        before = dict(files)
        change(files)
        assert files != before, name
    for path, text in files.items():
        (target / path).write_text(text)
