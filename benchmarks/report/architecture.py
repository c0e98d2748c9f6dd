"""Figures 1 to 5 of the paper for this program: the architecture, and the data flow of each stage, as one drawing."""

from dataclasses import dataclass

ALL, RANKS, GPUS = (0, 1, 2, 3), (1, 3), (2, 3)  # stages: all, those with many ranks, those on GPUs
ADDS = {RANKS: "MPI", (1,): "MPI", GPUS: "CUDA", (3,): "MPI and CUDA"}  # what needs the rows of these stages


@dataclass(frozen=True)
class Work:
    """One row of a data flow. kind: "host", "gpu" (on a GPU in stages 2 and 3), or "net", a collective of all ranks.

    root_only: whether only rank 0 does it. once: whether it is done before the steps.
    """

    text: str
    kind: str = "host"
    stages: tuple = ALL
    root_only: bool = False
    once: bool = False

    def place(self, stage):
        """Where it runs in this stage: "host", "gpu" or "net"."""
        return "host" if self.kind == "gpu" and stage not in GPUS else self.kind

    @property
    def adds(self):
        """What the program needs beside NumPy for this row; "" for a row of stage 0."""
        return ADDS.get(self.stages, "")


STEP = [
    Work("read the corpus and encode it as tokens", root_only=True, once=True),
    Work("broadcast of the tokens", "net", RANKS, once=True),
    Work("initial parameters from the seed", root_only=True, once=True),
    Work("broadcast of the parameters", "net", RANKS, once=True),
    Work("batch: B × T tokens", stages=(0, 2)),
    Work("own rows: B/p × T tokens", stages=RANKS),
    Work("divide the batch into micro-batches", stages=(0, 1)),
    Work("sort the tokens for the gradient of the embedding", stages=GPUS),
    Work("copy to static input buffers of the CUDA graph", "gpu", GPUS),
    Work("forward: losses; threads divide the micro-batches", stages=(0, 1)),
    Work("backward: gradients, added in a fixed order", stages=(0, 1)),
    Work("forward: loss", "gpu", GPUS),
    Work("backward: gradients", "gpu", GPUS),
    Work("all-reduce of the gradients by MPI messages, added in a fixed order", "net", (1,)),
    Work("reduce-scatter of the gradients by NCCL: rank r receives slice r of the sum", "net", (3,)),
    Work("norm, clipping, AdamW", "gpu", (0, 1, 2)),
    Work("norm, clipping, AdamW on the own slice (ZeRO-1)", "gpu", (3,)),
    Work("all-gather of the updated slices by NCCL", "net", (3,)),
    Work("all-gather of losses and signals", "net", RANKS),
    Work("print and log the loss, save checkpoints", root_only=True),
]


def flow(stage):
    """{"once": [Work], "every step": [Work]} of a stage."""
    rows = [work for work in STEP if stage in work.stages]
    return {"once": [work for work in rows if work.once], "every step": [work for work in rows if not work.once]}


def lanes(stage):
    return ["rank 0", "ranks 1 to p − 1"] if stage in RANKS else ["one process"]
