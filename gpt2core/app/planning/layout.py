"""A Layout: one way to divide a training step over ranks, threads and micro-batches, as data."""

import math
from dataclasses import dataclass

from gpt2core.architecture import GPT2Config
from gpt2core.data import even_slices
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.mesh import GROUPS, Grid, place_of, rank_in
from gpt2core.parallel.part import recomputed_units
from gpt2core.parallel.pipeline.micro_batches import make_schedule
from gpt2core.parallel.pipeline.placement import units_of_chunks

FP32 = 4  # bytes


@dataclass(frozen=True)
class Layout:
    """replicas: data-parallel ranks. batch_size, micro_batches: of the global batch. merged: micro-batches of a pass.

    threads: of each rank. compute_bytes: of a number of the activations, and of the parameters that kernels read.
    """

    config: GPT2Config
    parallel: ParallelConfig
    batch_size: int
    seq_len: int
    micro_batches: int
    replicas: int = 1
    merged: int = 1
    threads: int = 1
    compute_bytes: int = FP32

    @property
    def ranks(self):
        return math.prod(self.grid)

    @property
    def count(self):
        """The micro-batches of one replica."""
        return self.micro_batches // self.replicas

    @property
    def grid(self):
        return Grid(pipeline=self.parallel.pp, data=self.replicas, tensor=self.parallel.tp)

    @property
    def sizes(self):
        """{name of a group of the Mesh: its number of ranks}."""
        return {name: math.prod(getattr(self.grid, axis) for axis in axes) for name, axes in GROUPS.items()}

    def passes(self):
        """The number of sequences of each pass of a replica, over all of its threads."""
        parts = even_slices(self.batch_size // self.replicas, self.count // self.merged)
        return [part.stop - part.start for part in parts]

    def schedule(self):
        """The actions of each rank of the pipeline, which each of its threads runs with its own micro-batches."""
        return make_schedule(self.parallel, self.count // self.threads, self.config.tied)

    def rank_of(self, place):
        """{name of a group of the Mesh: the rank of this place, a Grid, in it}."""
        return {name: rank_in(place, self.grid, axes) for name, axes in GROUPS.items()}

    def places(self):
        """The place, a Grid, of each rank of the world."""
        return [place_of(rank, self.grid) for rank in range(self.ranks)]


def own_chunks(layout, pipeline):
    """[the names of the units of each chunk] of a rank of the pipeline."""
    parallel = layout.parallel
    return units_of_chunks(layout.config, parallel.pp * parallel.chunks)[pipeline :: parallel.pp]


def recomputed(layout, units):
    """The blocks of a chunk that backward computes again."""
    return recomputed_units(units, layout.parallel.recompute)
