"""The runs that the report compares: measured on this machine or, for GPUs, taken from results/."""

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.harness.speedups import Speedup
from benchmarks.harness.table_format import load
from benchmarks.report.parts import remark

STAGE_NAMES = {
    0: "stage 0, NumPy",
    1: "stage 1, NumPy and MPI",
    2: "stage 2, CUDA",
    3: "stage 3, CUDA, MPI and NCCL",
}
PAPER_NAMES = dict(zip(STAGE_NAMES, ("serial", "MPI", "CUDA", "MPI and CUDA"), strict=True))
PARTS = {  # {what is compared: the parts of stages 0 to 3}
    "training": ("train0", "train1", "train2", "train3"),
    "inference": ("infer0", "infer1", "infer2", "infer3"),
}
PAPER_STEPS = 50
THIS_MACHINE = "this machine"


class Run(NamedTuple):
    """One number or curve. where: precision and hardware; for a shipped result, from results/, also date and file."""

    value: object
    where: str
    shipped: bool = False


@dataclass(frozen=True)
class Runs:
    """The records that run_parts() returns. preset, steps: of the training runs."""

    records: dict
    preset: str
    steps: int

    @property
    def is_paper(self):
        """Whether the training runs are those of the paper, so that shipped results can stand beside them."""
        return (self.preset, self.steps) == ("paper", PAPER_STEPS)

    def results(self, name):
        """The results of a part, or None."""
        return self.records.get(name, {}).get("results")

    def reason(self, name):
        no_gpu = "no GPU was found, and results/ has no run with this preset and number of steps"
        return self.records.get(name, {}).get("missing", no_gpu)

    def measured(self, name, field):
        """A Run of this machine, or None: a field of the results of a part."""
        if not (results := self.results(name)):
            return None
        compiles = "with the compilation of the kernels" * (name in PARTS["training"][2:])
        ranks = f"{results['ranks']} ranks" if results["ranks"] else ""
        where = "fp32", THIS_MACHINE, ranks, compiles, remark(self.records[name])
        return Run(results[field], ", ".join(filter(None, where)))

    def run(self, what, stage):
        """The seconds of the "training" or the "inference" of a stage, a Run or None."""
        found = shipped_runs().get((what, stage)) if what == "inference" or self.is_paper else None
        return self.measured(PARTS[what][stage], "seconds") or (found and Run(*found, shipped=True))

    def curves(self):
        """{label: Run with the losses} of all four stages."""
        parts = {"stage 0": "train0", "stage 1 on 2 ranks": "train1", "stage 2": "train2", "stage 3": "train3"}
        found = {label: run for label, name in parts.items() if (run := self.measured(name, "losses"))}
        if self.preset == "paper":  # the first steps are those of a shorter run: its learning rate is constant
            for stage, ranks in (("stage 2", 1), ("stage 3", 2)):
                if losses := shipped_curve(ranks):
                    found.setdefault(stage, Run(losses, f"fp32; {origin('gpus/parity', ranks)}", True))
        return found


# -- shipped results of GPUs; each is marked with its source -----------------------------------------------------------


def origin(name, used=None):
    """Where and when results/NAME.json was measured, for a caption. used: how many of several GPUs were used."""
    record = load(name)
    where = f"{used} of " * bool(used) + record["machine"]
    return f"{where}, {record['date'][:10]}, commit {record['commit']} (results/{name}.json)"


def shipped_curve(ranks):
    """The losses of preset `paper` in fp32 with --deterministic on this number of ranks in gpus/parity, or None."""
    for row in load("gpus/parity")["results"]["runs"]:  # an older row has no preset, and its one process is "stage 2"
        deterministic = row["name"] in ("one process", "stage 2") or "--deterministic" in row["name"]
        if deterministic and (row.get("preset", "paper"), row["precision"], row["ranks"]) == ("paper", "fp32", ranks):
            return row["losses"]


def shipped_runs():
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
