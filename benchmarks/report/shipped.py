"""Results of GPUs from results/, for the sections that this machine cannot measure. Each is marked with its source."""

from benchmarks.harness.speedups import Speedup
from benchmarks.harness.table_format import load


def origin(name, used=None):
    """Where and when results/NAME.json was measured, for a caption. used: how many of several GPUs were used."""
    record = load(name)
    where = f"{used} of " * bool(used) + record["machine"]
    return f"{where}, {record['date'][:10]}, commit {record['commit']} (results/{name}.json)"


def curve(name, ranks):
    """The 50 losses of preset `paper` in fp32 of the first row with this name and number of ranks in gpus/parity."""
    rows = load("gpus/parity")["results"]["runs"]
    return next(r["losses"] for r in rows if r["precision"] == "fp32" and r["ranks"] == ranks and name in r["name"])


def runs():
    """{(what, stage): (seconds, precision and source)}; a training has 50 steps of `paper`."""
    step = next(r for r in load("gpu/step_paper_fp32")["results"] if r["name"] == "ours")
    paper = next(r for r in load("gpus/scaling")["results"]["paper"] if r["name"].endswith("--zero 1"))
    decode = next(r for r in load("gpu/decode_paper")["results"] if r["name"] == "ours" and r["precision"] == "fp32")
    how = "fp32, 50 times the median step"
    return {
        ("training", 2): (50 * step["seconds"]["median"], f"{how}; {origin('gpu/step_paper_fp32')}"),
        ("training", 3): (paper["totals"]["median"], f"bf16; {origin('gpus/scaling', paper['ranks'])}"),
        ("inference", 2): (decode["total"]["median"], f"fp32; {origin('gpu/decode_paper')}"),
    }


def gain_gpus():
    """(Speedup of two GPUs over one, its source): stage 3 on GPT-2 124M."""
    rows = load("gpus/scaling_two")["results"]["scaling"][0]["rows"]
    row = next(each for each in rows if each["name"].endswith("--zero 1") and each["ranks"] == 2)
    source = f"GPT-2 124M, 64 sequences a GPU; {origin('gpus/scaling_two', 2)}"
    return Speedup(2 * row["efficiency"]["median"], 2), source
