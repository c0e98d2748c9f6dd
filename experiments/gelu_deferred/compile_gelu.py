import os, re, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
os.environ["TRITON_CACHE_DIR"] = os.path.join(here, "cache", os.path.basename(sys.prefix))
os.environ["TRITON_ALWAYS_COMPILE"] = "1"
sys.path.insert(0, os.path.dirname(here))
from types import SimpleNamespace
import triton
from triton.backends.compiler import GPUTarget
target = GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda d: 0, get_current_target=lambda: target))
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
import importlib
mod = importlib.import_module(sys.argv[1])
class Fake:
    def __init__(self, dtype, *shape): self.dtype, self.shape = dtype, list(shape)
    def data_ptr(self): return 1 << 20
    def stride(self): return [self.shape[1], 1]
PTXAS = triton.knobs.nvidia.ptxas.path
def tool(name, *w): return subprocess.run([getattr(triton.knobs.nvidia, name).path, *w], capture_output=True, text=True).stdout
keep = os.path.join(here, "out_" + triton.__version__); os.makedirs(keep, exist_ok=True)
def desc(dt, shape, block):
    layout = gl.NVMMASharedLayout.get_default_for(list(block), {"bf16": gl.bfloat16, "fp16": gl.float16}[dt])
    return TensorDescriptor(Fake(dt, *shape), list(shape), [shape[1], 1], list(block), layout)
def report(name, k):
    ptx = k.asm["ptx"]; p = f"{keep}/{name}.ptx"; open(p, "w").write(ptx)
    open(f"{keep}/{name}.ttgir","w").write(k.asm["ttgir"]); open(f"{keep}/{name}.llir","w").write(k.asm["llir"])
    cub = f"{keep}/{name}.cubin"; open(cub, "wb").write(k.asm["cubin"])
    log = subprocess.run([PTXAS, "-v", "-lineinfo", "--gpu-name=sm_90a", p, "-o", "/dev/null"], capture_output=True, text=True).stderr
    sass = tool("nvdisasm", "--print-code", cub); open(f"{keep}/{name}.sass", "w").write(sass)
    log = [l for l in log.splitlines() if "Used" in l or "spill" in l or "warning" in l.lower() or "C7" in l or "setmaxnreg" in l or "erializ" in l]
    print(f"== {name}: warps {k.metadata.num_warps} shared {k.metadata.shared}")
    for l in log: print("   ", l.strip())
    n = lambda pat: len(re.findall(pat, sass))
    print("    HGMMA", n(r"\bHGMMA"), "DEPBAR", n("WARPGROUP.DEPBAR"), "BAR.SYNC", n(r"BAR\.SYNC"), "USETMAXREG", re.findall(r"USETMAXREG[^;]*", sass), "EX2", n("MUFU.EX2"), "STL", n(r"\bSTL"), "LDL", n(r"\bLDL"), "SHFL", n("SHFL"), "STSM", n("STSM"), "STS", n(r"\bSTS\b"), "STG", n(r"\bSTG"), "LDG", n(r"\bLDG"), flush=True)
M, N, K = eval(os.environ.get('MNK', '(65536, 3072, 768)')); dt = os.environ.get('DT', 'bf16')
def compile(name, tile, backward, dt=dt, maxnreg=168, registers=240):
    t = tile
    rows_b, cols_b = (N, K) if backward else (K, N)
    block_b = (256, t.BLOCK_K) if backward else (t.BLOCK_K, 256)
    a, b = desc(dt, (M, K), (128, t.BLOCK_K)), desc(dt, (rows_b, cols_b), block_b)
    extra = Fake("fp32" if backward else dt, M // 64, N)
    tm = M // 128
    k = mod.gelu_product_kernel.warmup(Fake(dt, M, N), Fake(dt, M, N), extra, a, b, tm, tm * N // 256, K // t.BLOCK_K,
        grid=(1,), COLUMNS=N, BACKWARD=backward, REGISTERS=registers, num_warps=4, maxnreg=maxnreg, **t._asdict())
    report(name, k)
if __name__ == "__main__":
    which = sys.argv[2:] 
    for name, tile in {"base": mod.GeluTile(), "k32": mod.GeluTile(BLOCK_K=32, STAGES=6), "group8": mod.GeluTile(GROUP=8), "rows16": mod.GeluTile(EPILOGUE_ROWS=16), "pre": mod.GeluTile(PREFETCH=True,STREAM=True)}.items():
        for backward in (False, True):
            full = name + ("-bwd" if backward else "-fwd")
            if which and not any(w in full for w in which): continue
            try: compile(full, tile, backward)
            except Exception as e:
                import traceback; print("==", full, "ERROR", type(e).__name__, str(e)[-600:]); c = e
                while c.__cause__: c = c.__cause__; print("   cause:", type(c).__name__, str(c)[-700:], flush=True)
