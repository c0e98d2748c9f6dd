"""Figures 2 to 5 of the paper for this program: the data flow of each stage, as one drawing."""

ALL, RANKS, GPUS = (0, 1, 2, 3), (1, 3), (2, 3)  # stages: all, those with many ranks, those on GPUs
ADDS = {RANKS: "MPI", (1,): "MPI", GPUS: "CUDA", (3,): "MPI and CUDA"}  # what the rows of these stages need
ONCE = [  # (text, kind, stages); kind: "host", "host root" (only rank 0), "gpu" (in stages 2 and 3), "net" (collective)
    ("read the corpus and encode it as tokens", "host root", ALL),
    ("broadcast of the tokens", "net", RANKS),
    ("initial parameters from the seed", "host root", ALL),
    ("broadcast of the parameters", "net", RANKS),
]
EVERY_STEP = [
    ("batch: B × T tokens", "host", (0, 2)),
    ("own rows: B/p × T tokens", "host", RANKS),
    ("divide the batch into micro-batches", "host", (0, 1)),
    ("sort the tokens for the gradient of the embedding", "host", GPUS),
    ("copy to static input buffers of the CUDA graph", "gpu", GPUS),
    ("forward: losses; threads divide the micro-batches", "host", (0, 1)),
    ("backward: gradients, added in a fixed order", "host", (0, 1)),
    ("forward: loss", "gpu", GPUS),
    ("backward: gradients", "gpu", GPUS),
    ("all-reduce of the gradients by MPI messages, added in a fixed order", "net", (1,)),
    ("reduce-scatter of the gradients by NCCL: rank r receives slice r of the sum", "net", (3,)),
    ("norm, clipping, AdamW", "gpu", (0, 1, 2)),
    ("norm, clipping, AdamW on the own slice (ZeRO-1)", "gpu", (3,)),
    ("all-gather of the updated slices by NCCL", "net", (3,)),
    ("all-gather of losses and signals", "net", RANKS),
    ("print and log the loss, save checkpoints", "host root", ALL),
]


def flow(stage):
    """{"once" or "every step": [(text, kind, what it needs beside NumPy or "")]} of a stage."""
    return {
        when: [
            (text, "host" if kind == "gpu" and stage not in GPUS else kind, ADDS.get(stages, ""))
            for text, kind, stages in rows if stage in stages
        ]
        for when, rows in (("once", ONCE), ("every step", EVERY_STEP))
    }  # fmt: skip


def lanes(stage):
    return ["rank 0", "ranks 1 to p − 1"] if stage in RANKS else ["one process"]
