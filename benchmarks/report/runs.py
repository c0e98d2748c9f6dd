"""The runs that the report compares: measured on this machine or, for GPUs, taken from results/."""

from dataclasses import dataclass

from benchmarks.harness.speedups import speedups
from benchmarks.report import shipped
from benchmarks.report.parts import disturbance
from gpt2core.errors import counted

STAGE_NAMES = {
    0: "stage 0, NumPy",
    1: "stage 1, NumPy and MPI",
    2: "stage 2, CUDA",
    3: "stage 3, CUDA, MPI and NCCL",
}
PAPER_NAMES = dict(zip(STAGE_NAMES, ("serial", "MPI", "CUDA", "MPI and CUDA"), strict=True))
PARTS = {  # {what is compared: the parts of stages 0 to 3}; --mode replicate is the paper's method
    "training": ("train0", "train1-2", "train2", "train3"),
    "inference": ("infer0", "infer1-replicate", "infer2", "infer3"),
}
PAPER_STEPS = 50
RANKS = 1, 2, 4, 8  # of the trainings of stage 1; 2 without --full
THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Run:
    """One number or curve. where: the precision and the hardware, for a shipped result also its date and file.

    shipped: from results/. disturbed: whether a comparison shows that other programs slowed the run.
    """

    value: object
    where: str
    shipped: bool = False
    disturbed: bool = False


@dataclass(frozen=True)
class Runs:
    """The records of the measured parts, and the reasons of the missing ones. preset, steps: of the training runs."""

    records: dict
    missing: dict
    preset: str
    steps: int

    @property
    def is_paper(self):
        """Whether the training runs are those of the paper, so that shipped results can stand beside them."""
        return (self.preset, self.steps) == ("paper", PAPER_STEPS)

    def results(self, name):
        """The results of a part, or None."""
        return self.records[name]["results"] if name in self.records else None

    def reason(self, name):
        return self.missing.get(name, "no GPU was found, and results/ has no run with this preset and number of steps")

    def place(self, name):
        ranks, disturbed = self.results(name)["ranks"], disturbance(self.records[name])
        found = f"fp32, {THIS_MACHINE}" + (f", {ranks} ranks" if ranks else "")
        found += ", with the compilation of the kernels" * (name in PARTS["training"][2:])
        return found + (f", {disturbed}" if disturbed else "")

    def run(self, what, stage):
        """The seconds of the "training" or the "inference" of a stage, a Run or None."""
        name = PARTS[what][stage]
        if results := self.results(name):
            disturbed = name == "infer0" and any(each.above for each in self.inference_speedups().values())
            return Run(results["seconds"], self.place(name) + ", disturbed" * disturbed, disturbed=disturbed)
        found = shipped.runs().get((what, stage)) if what == "inference" or self.is_paper else None
        return found and Run(*found, shipped=True)

    def curves(self):
        """{label: Run with the losses} of all four stages."""
        parts = {"train0": "stage 0"} | {f"train1-{ranks}": f"stage 1 on {counted(ranks, 'rank')}" for ranks in RANKS}
        parts |= {"train2": "stage 2", "train3": "stage 3"}
        found = {
            parts[name]: Run(self.results(name)["losses"], self.place(name)) for name in parts if name in self.records
        }
        if self.preset == "paper":  # the first steps are those of a shorter run: its learning rate is constant
            for stage, name, ranks in (("stage 2", "stage 2", 1), ("stage 3", "--deterministic", 2)):
                source = f"fp32; {shipped.origin('gpus/parity', ranks)}"
                found.setdefault(stage, Run(shipped.curve(name, ranks), source, True))
        return found

    # -- ratios with an ideal ------------------------------------------------------------------------------------------

    def scaling_speedups(self):
        """(seconds of a step with one thread, {("threads" or "ranks", count): Speedup}), or None."""
        results = self.results("scaling") or {"rows": []}
        times = {(row["kind"], row["count"]): row["step_seconds"] for row in results["rows"]}
        one = times.pop(("threads", 1), None)
        return one and (one, speedups(one, {key: (time, key[1]) for key, time in times.items()}))

    def inference_speedups(self):
        """{part: Speedup relative to stage 0} of the modes of stage 1, which use as many cores as stage 0.

        The ideal is 1 if every rank computes all, and the number of ranks if they divide each layer.
        """
        ideals = {"infer1-replicate": 1, "infer1-tensor": (self.results("infer1-tensor") or {}).get("ranks")}
        times = {name: (found["seconds"], ideals[name]) for name in ideals if (found := self.results(name))}
        base = self.results("infer0")
        return speedups(base["seconds"], times) if base else {}
