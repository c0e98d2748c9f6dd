"""Random GPT-2 weights, packed for decode_floor.cu, and the decode step in NumPy."""

import numpy as np

G, C, H, D, SPLITS, KEYS, SLOT = 128, 768, 12, 64, 4, 256, 36864
SET_WORDS = 2304 + 12 * SPLITS * 34 + C + 1536 + C
EXCHANGE_WORDS = 2 * SET_WORDS + 2 * G * 2
EMPTY = 0xFFFFFFFF


def to_bf16(x):
    """The bits of float32 x as bf16 (round to nearest even), uint16."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(u):
    return (u.astype(np.uint32) << 16).view(np.float32)


def pack24(m):
    """(n, 24, 768) uint16 -> (n, 18432): for each 8 columns, warp and half: 32 lanes of 8 elements."""
    n = len(m)
    return m.reshape(n, 3, 8, 12, 4, 2, 8).transpose(0, 1, 3, 5, 2, 4, 6).reshape(n, 18432)


def pack6(m):
    """(n, 6, 3072) uint16 -> (n, 18432): for each warp, half of its rows and quarter: 24 lanes of 8 elements."""
    n = len(m)
    return m.reshape(n, 6, 12, 2, 4, 4, 8).transpose(0, 2, 3, 5, 1, 4, 6).reshape(n, 18432)


class Model:
    """layers, V: the size; slots, rows: slots of the unembedding and its rows per block."""

    def __init__(self, layers=12, V=50257, slots=17, rows=393, positions=1024, seed=1):
        rng = np.random.default_rng(seed)
        normal = lambda *shape, std=0.02: std * rng.standard_normal(shape, np.float32)  # noqa: E731
        self.n_layer, self.V, self.slots, self.rows, self.positions = layers, V, slots, rows, positions
        # products as (N, K)
        self.qkv = [to_bf16(normal(3 * C, C, std=0.04)) for _ in range(layers)]
        self.proj = [to_bf16(normal(C, C)) for _ in range(layers)]
        self.fc = [to_bf16(normal(4 * C, C)) for _ in range(layers)]
        self.fc2 = [to_bf16(normal(C, 4 * C)) for _ in range(layers)]
        self.wte, self.wpe = to_bf16(normal(V, C)), normal(positions, C, std=0.02)
        self.biases = [[normal(n, std=0.1) for n in (3 * C, C, 4 * C, C)] for _ in range(layers)]
        self.ln = 1 + normal(layers, 2, 2, C, std=0.1)  # layer, which, weight or bias
        self.ln[:, :, 1] -= 1
        self.ln_f = np.stack([1 + normal(C, std=0.1), normal(C, std=0.1)])

    def packed(self):
        """The arrays of decode(): layers, head, vectors, gammas, final, wte, wpe."""
        slabs, vectors = [], np.zeros((self.n_layer, G, 6, 24), np.float32)
        for i in range(self.n_layer):
            first = np.concatenate([self.qkv[i].reshape(G, 18, C), self.proj[i].reshape(G, 6, C)], 1)
            slabs += [pack24(first), pack24(self.fc[i].reshape(G, 24, C)), pack6(self.fc2[i].reshape(G, 6, 4 * C))]
            b_qkv, b_proj, b_fc, b_fc2 = self.biases[i]
            for at, w, ln, b in ((0, self.qkv[i], self.ln[i, 0], b_qkv), (2, self.fc[i], self.ln[i, 1], b_fc)):
                w, n = from_bf16(w), len(w) // G
                vectors[i, :, at, :n] = (w @ ln[0]).reshape(G, n)
                vectors[i, :, at + 1, :n] = (w @ ln[1] + b).reshape(G, n)
            vectors[i, :, 4, :6], vectors[i, :, 5, :6] = b_proj.reshape(G, 6), b_fc2.reshape(G, 6)
        rows = np.zeros((G * self.rows, C), np.uint16)
        rows[: self.V] = self.wte
        padded = np.zeros((G, self.slots * 24, C), np.uint16)
        padded[:, : self.rows] = rows.reshape(G, self.rows, C)
        head = pack24(padded.reshape(G * self.slots, 24, C)).reshape(G, -1)[:, : self.slots * 18432 - 6144]
        return (
            np.stack(slabs), np.ascontiguousarray(head), vectors, np.ascontiguousarray(self.ln[:, :, 0]),
            self.ln_f, self.wte, self.wpe,
        )  # fmt: skip

    def random_cache(self, length, seed=2):
        """(layers, H, SPLITS, KEYS, 128) uint16; key j is at [j % SPLITS, j // SPLITS]: 64 of k, then 64 of v."""
        rng = np.random.default_rng(seed)
        cache = np.zeros((self.n_layer, H, SPLITS, KEYS, 2 * D), np.uint16)
        for j in range(length):
            cache[:, :, j % SPLITS, j // SPLITS] = to_bf16(rng.standard_normal((self.n_layer, H, 2 * D), np.float32))
        return cache

    def step(self, token, position, cache):
        """One decode step in float32; updates the cache. Returns (x after the last layer, logits)."""
        x = from_bf16(self.wte[token]) + self.wpe[position]
        for i in range(self.n_layer):
            b_qkv, b_proj, b_fc, b_fc2 = self.biases[i]
            qkv = from_bf16(self.qkv[i]) @ layernorm(x, *self.ln[i, 0]) + b_qkv
            q, k, v = qkv.reshape(3, H, D)
            cache[i, :, position % SPLITS, position // SPLITS] = np.concatenate([to_bf16(k), to_bf16(v)], 1)
            j = np.arange(position + 1)
            kv = from_bf16(cache[i][:, j % SPLITS, j // SPLITS])  # (H, length, 2 D)
            s = np.einsum("hd,hjd->hj", q, kv[:, :, :D]) / 8
            p = np.exp(s - s.max(1, keepdims=True))
            y = np.einsum("hj,hjd->hd", p / p.sum(1, keepdims=True), kv[:, :, D:]).reshape(C)
            x = x + from_bf16(self.proj[i]) @ y + b_proj
            g = from_bf16(self.fc[i]) @ layernorm(x, *self.ln[i, 1]) + b_fc
            g = 0.5 * g * (1 + np.tanh(0.7978845608 * (g + 0.044715 * g**3)))
            x = x + from_bf16(self.fc2[i]) @ g + b_fc2
        return x, from_bf16(self.wte) @ layernorm(x, *self.ln_f)


def layernorm(x, w, b):
    x = x - x.mean()
    return x / np.sqrt((x * x).mean() + 1e-5) * w + b


def error(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
