import ctypes, sys, time
import numpy as np
import floor_model as fm
lib = ctypes.CDLL("./emulate.so")
m = fm.Model(2, 4204, 2, 33, seed=3)
arrays = [np.ascontiguousarray(a) for a in m.packed()]
def aligned(a):
    buf = np.zeros(a.nbytes + 64, np.uint8); o = -buf.ctypes.data % 64
    out = buf[o:o + a.nbytes].view(a.dtype).reshape(a.shape); out[...] = a; return out
start, order = int(sys.argv[1]), int(sys.argv[2])
launches = [int(x) for x in sys.argv[3].split(",")]
cache = m.random_cache(start); ref = cache.copy()
arrays = [aligned(a) for a in arrays]; cache = aligned(cache)
exch = aligned(np.full(4 * fm.EXCHANGE_WORDS, fm.EMPTY, np.uint32))
logits, x = aligned(np.zeros(m.V, np.float32)), aligned(np.zeros(768, np.float32))
state, rb = aligned(np.array([7, start, 0], np.int32)), aligned(np.full(1024, -1, np.int32))
ptrs = [a.ctypes.data for a in (*arrays, cache, exch, logits, x, state, rb)] + [0]
tok, pos, step = 7, start, 0
for tokens in launches:
    t = time.time()
    lib.run((ctypes.c_void_p * 14)(*ptrs), tokens, 3, order)
    for _ in range(tokens):
        xr, lr = m.step(tok, pos, ref); tok = int(lr.argmax()); pos += 1
        print("token", rb[step], tok); step += 1
        tok = int(rb[step - 1])
    print("state", state, "x err", fm.error(x, xr), "logits err", fm.error(logits, lr), "cache err", fm.error(fm.from_bf16(cache), fm.from_bf16(ref)), f"{time.time()-t:.1f}s", flush=True)
