"""Decode with clusters against the present step: correctness and time, one H100 or H200."""
import os, statistics, sys, time, traceback
from pathlib import Path
import numpy as np
from benchmarks.harness.ours import CudaGenerator, seconds_per_step
from gpt2core.app.presets import PRESETS
from gpt2core.sampler import generate_batch
from stage2_cuda.decoding import cluster_step, decoder as decoder_module

OUT = Path(os.environ.get("OUT", "/tmp"))
started = time.time()
log = open(OUT / "cluster.txt", "a")
def say(*text):
    line = f"[{time.time()-started:5.1f}] " + " ".join(map(str, text))
    print(line, flush=True); print(line, file=log, flush=True)

SUPPORTS, SOURCE, TEXT = cluster_step.supports, cluster_step.SOURCE, cluster_step.SOURCE.read_text()
def change(*pairs):
    def make(text):
        for old, new in pairs:
            assert old in text, old
            text = text.replace(old, new)
        return text
    return make
NO = ("griddepcontrol.wait; griddepcontrol.launch_dependents;", "griddepcontrol.wait;")
GO = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");\n'
T = {1: [("  wait_for_signal(&memory.row.arrived);\n", "  " + GO + "  wait_for_signal(&memory.row.arrived);\n")],
     2: [("  wait_for_signal(&memory.row.arrived);\n", "  wait_for_signal(&memory.row.arrived);\n  " + GO)],
     3: [("  const u32 rounded", "  " + GO + "  const u32 rounded"), ("  const Four four = split_lanes(h", "  " + GO + "  const Four four = split_lanes(h")],
     4: [("  float q[8];\n", "  " + GO + "  float q[8];\n"), ("  wait_for_signal(&memory.hidden_arrived);\n", "  wait_for_signal(&memory.hidden_arrived);\n  " + GO)],
     5: [("  // combine the 8 warps", "  " + GO + "  // combine the 8 warps"), ("  wait_for_signal(&memory.hidden_arrived);\n", "  wait_for_signal(&memory.hidden_arrived);\n  " + GO)]}
# the prefetch after the row instead of before the wait
import re
def late_prefetch(text):
    for call in re.findall(r"  prefetch_weights\(ahead.*;\n", text):
        text = text.replace(call, "", 1)
        kind = "const float value = layernorm" if "C / D" in call else "const float h = layernorm"
        assert kind in text
        text = text.replace("  " + kind, call + "  " + kind)
    return text
VARIANTS = {
    "single row": None,
    "cluster": change(),
}
config = PRESETS["gpt2"]
generator = CudaGenerator(config, 1, "bf16")
xp = generator.backend.xp
say(xp.cuda.runtime.getDeviceProperties(0)["name"].decode())
lay = generator.model.parameters["transformer.h.0.ln_1.weight"].data
say("dtype of LayerNorm's weight", lay.dtype, "of the head", generator.model.head.data.dtype)

def decoder_of(name, **constants):
    make = VARIANTS[name]
    cluster_step.supports = (lambda *a: False) if make is None else SUPPORTS
    if make is not None:
        cluster_step.SOURCE = None
        path = OUT / f"v_{name.replace(' ', '_')}.cu"
        path = Path("/tmp") / path.name
        path.write_text(make(TEXT))
        cluster_step.SOURCE = path
    decoder = generator.decoder(1, **constants)
    if "no head" in constants: pass
    return decoder

def logits_of(decoder, prompt, count):
    seen = []
    def choose(logits):
        seen.append(logits.copy()); return int(logits.argmax())
    decoder.start([prompt], [choose])
    tokens = []
    for _ in range(count):
        decoder.step(); tokens.append(decoder.read_tokens()[0])
    return np.array(seen), tokens

rng = np.random.default_rng(0)
# 1. correctness
try:
    for length in (300,):
        prompt = rng.integers(0, 50257, length).tolist()
        found = {name: logits_of(decoder_of(name), prompt, 20) for name in VARIANTS if not name.startswith("X")}
        want, tokens = found["single row"]
        full = generator.model.logits(np.array([[*prompt, *tokens[:19]]])).numpy()[0, -1]
        for name, (got, ids) in found.items():
            errors = np.linalg.norm(got.reshape(len(got), -1) - want.reshape(len(want), -1), axis=1) / np.linalg.norm(want.reshape(len(want), -1), axis=1)
            last = got[-1].ravel()
            say(f"length {length} {name:28} difference from single row: max {errors.max():.5f}, same tokens {ids == tokens}, from the training kernels {np.linalg.norm(last - full) / np.linalg.norm(full):.5f}")
except Exception:
    say(traceback.format_exc())
# 2. time
decoders = {}
for name in VARIANTS:
    try:
        decoders[name] = decoder_of(name)
        decoders[name].start([[1] * 256], [__import__("gpt2core.sampler").sampler.Greedy()])
        times = seconds_per_step(decoders[name], [rng.integers(0, 50257, 256).tolist()], 50)
        cluster_step.supports = SUPPORTS
    except Exception:
        say(name, traceback.format_exc()[-600:]); decoders.pop(name, None)
prompt = rng.integers(0, 50257, 256).tolist()
nohead = {}
for name in ():
    nohead[name] = d = decoder_of(name)
    d.unembed = lambda: None
    seconds_per_step(d, [rng.integers(0, 50257, 256).tolist()], 50)
rounds = {}
from stage2_cuda.runtime import cuda_launch
for policy in (1, 2):
    cuda_launch.POLICY = policy
    decoders[f"policy {policy}"] = decoder_of("cluster")
    seconds_per_step(decoders[f"policy {policy}"], [prompt], 50)
    cluster_step.LOGIT_CLUSTERS = 30
    decoders[f"policy {policy}, 30 clusters"] = decoder_of("cluster")
    seconds_per_step(decoders[f"policy {policy}, 30 clusters"], [prompt], 50)
    cluster_step.LOGIT_CLUSTERS = 24
cuda_launch.POLICY = 0
keep = cluster_step.parts_of_head
cluster_step.parts_of_head = lambda head: ((None, None), (None, None))
decoders["no head ahead"] = decoder_of("cluster")
seconds_per_step(decoders["no head ahead"], [prompt], 50)
cluster_step.parts_of_head = keep
for name, pairs in {
    "arrive before the stats": [],
    "trigger after the send": [("griddepcontrol.wait; griddepcontrol.launch_dependents;", "griddepcontrol.wait;"), ("  wait_for_signal(&memory.row.arrived);\n", '  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");\n  wait_for_signal(&memory.row.arrived);\n'), ("  wait_for_signal(&row.arrived);\n", '  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");\n  wait_for_signal(&row.arrived);\n')],
    "logits: 1 block": [("KERNEL logits_kernel", 'extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(256, 1) logits_kernel'), ("const int GROUP = 5;", "const int GROUP = 9;")],
}.items():
    if not pairs: continue
    VARIANTS[name] = change(*pairs)
    cluster_step.LOGIT_CLUSTERS = 15 if "1 block" in name else 24
    decoders[name] = decoder_of(name)
    seconds_per_step(decoders[name], [prompt], 50)
cluster_step.LOGIT_CLUSTERS = 24
for window in (5, 700, 1000):
    pass
cluster_step.LOGIT_CLUSTERS = 32
for vocab in ():
    decoders[f"cluster, vocabulary {vocab}"] = decoder_of("cluster", block_vocab=vocab)
    seconds_per_step(decoders[f"cluster, vocabulary {vocab}"], [prompt], 50)
for _ in range(5):
    for name, d in decoders.items():
        rounds.setdefault(name, []).append(1e6 * seconds_per_step(d, [prompt], 400))
    for name, d in nohead.items():
        rounds.setdefault(name + " without logits", []).append(1e6 * seconds_per_step(d, [prompt], 400))
for name, times in rounds.items():
    say(f"{name:36} {statistics.median(times):7.1f} us/token   {[round(t, 1) for t in times]}")

