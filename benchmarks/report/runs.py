"""The runs that the report compares: measured on this machine or, for GPUs, taken from results/."""

from dataclasses import dataclass

from benchmarks.harness.speedups import speedups
from benchmarks.report import shipped
from benchmarks.report.parts import BUSY
from benchmarks.report.units import seconds
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
    """One number or curve. where: the hardware and, for a shipped result, its date. shipped: from results/.

    disturbed: whether a comparison shows that other programs slowed the run.
    """

    value: object
    where: str
    shipped: bool = False
    disturbed: bool = False

    @property
    def note(self):
        """`where` with the precision. That of a shipped result has it; the measured runs are in fp32."""
        return self.where if self.shipped else f"fp32, {self.where}"


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
        return self.missing.get(name, "no GPU was found, and results/ has no measurement of it")

    def reason_of(self, what, stage):
        """Why there is no run() of this stage."""
        name = PARTS[what][stage]
        if name in self.missing or stage < 2 or what == "inference" or self.is_paper:
            return self.reason(name)
        here = f"of preset {self.preset} and {counted(self.steps, 'step')}"
        return f"no GPU was found, and the shipped result is of preset paper and 50 steps, not {here}"

    def run(self, what, stage):
        """The seconds of the "training" or the "inference" of a stage, a Run or None."""
        name = PARTS[what][stage]
        if results := self.results(name):
            compiles = what == "training" and stage >= 2
            note = f"; the first step compiles the kernels: {seconds(results['first_step'])}" if compiles else ""
            disturbed = name == "infer0" and any(each.above for each in self.inference_speedups().values())
            where = self.place(name) + note + ", disturbed" * disturbed
            return Run(results["seconds"], where, disturbed=disturbed)
        found = shipped.runs().get((what, stage)) if what == "inference" or self.is_paper else None
        return found and Run(*found, shipped=True)

    def place(self, name):
        ranks = self.records[name]["options"].get("ranks")
        return THIS_MACHINE + (f", {ranks} ranks" if ranks else "")

    # -- other programs ------------------------------------------------------------------------------------------------

    def busy_parts(self):
        """The names of the parts with times during which other programs ran."""

        def is_busy(record):
            cores = record.get("other_cores")
            return record.get("times", True) and (record.get("load_average", 0.0) if cores is None else cores) > BUSY

        return [name for name, record in self.records.items() if is_busy(record)]

    def meanwhile(self, *names):
        """What is known of other programs during the measurement of these parts: the largest value of them."""
        records = [self.records[name] for name in names]
        used = [record["other_cores"] for record in records if record.get("other_cores") is not None]
        if used:
            return f"while other programs used {'up to ' if len(used) > 1 else ''}{max(used):.1f} cores"
        load = max(record.get("load_average", 0.0) for record in records)
        return f"with a load average of {load:.1f} before the measurements"

    def busy(self, names, ratios):
        """The text of meanwhile() after a comma; "" if no Speedup of these parts is disturbed."""
        return f", {self.meanwhile(*names)}" if any(each.disturbed for each in ratios) else ""

    # -- ratios with an ideal ------------------------------------------------------------------------------------------

    def scaling_speedups(self):
        """(seconds of a step with one thread, {("threads" or "ranks", count): Speedup}), or None."""
        results = self.results("scaling") or {"rows": []}
        times = {(row["kind"], row["count"]): row["step_seconds"] for row in results["rows"]}
        one = times.pop(("threads", 1), None)
        return one and (one, speedups(one, {key: (time, key[1]) for key, time in times.items()}))

    def inference_speedups(self):
        """{part: Speedup per prompt, relative to stage 0} of the modes of stage 1, which use as many cores as stage 0.

        The ideal is 1 if nothing is divided, the number of ranks if they divide each layer, and the number of prompts
        if several prompts share each product.
        """
        runs, base = {}, self.results("infer0")
        for mode in ("replicate", "batch", "tensor"):
            if results := self.results(name := f"infer1-{mode}"):
                ideals = {"replicate": 1, "batch": results["prompts"], "tensor": self.records[name]["options"]["ranks"]}
                runs[name] = results["seconds"] / results["prompts"], ideals[mode]
        return speedups(base["seconds"], runs) if base else {}

    def curves(self):
        """{label: Run with the losses} of all four stages."""
        parts = {"train0": "stage 0"} | {f"train1-{ranks}": f"stage 1 on {counted(ranks, 'rank')}" for ranks in RANKS}
        losses = {title: self.results(name)["losses"] for name, title in parts.items() if name in self.records}
        found = {title: Run(values, THIS_MACHINE) for title, values in losses.items()}
        for stage, name, ranks in ((2, "stage 2", 1), (3, "--deterministic", 2)):
            if results := self.results(f"train{stage}"):
                found[f"stage {stage}"] = Run(results["losses"], self.place(f"train{stage}"))
            elif self.preset == "paper":  # the first steps are those of a shorter run: its learning rate is constant
                where = f"fp32; {shipped.origin('gpus/parity', ranks)}"
                found[f"stage {stage}"] = Run(shipped.curve(name, ranks), where, True)
        return found
