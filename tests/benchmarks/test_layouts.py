"""The random layouts of the benchmark that compares their bits: training accepts each, and each pair is drawn."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.gpus.layouts import layouts
from gpt2core.presets import PRESETS


@pytest.mark.parametrize("ranks, stage", [(2, 1), (4, 1), (8, 1), (4, 3)])
def test_the_random_layouts_have_every_pair_of_options(ranks, stage):
    found = layouts(np.random.default_rng(0), ranks, 150, replace(PRESETS["tiny"], n_layer=8), stage)
    drawn = set()
    for threads, options in found[1:]:
        replicas = ranks // (options["tp"] * options["pp"])
        names = {f"{name} > 1" for name in ("tp", "pp") if options[name] > 1}
        names |= {f"zero {options['zero']}"} if replicas > 1 else set()
        drawn.update(itertools.combinations(sorted(names | {f"threads {threads}"}), 2))
    wanted = {("pp > 1", "tp > 1")} if ranks > 2 else set()
    wanted |= {(f"{name} > 1", f"zero {zero}") for name in ("tp", "pp") for zero in range(4) if ranks > 2}
    if stage == 1:
        wanted |= {("pp > 1", "threads 2"), ("threads 2", "tp > 1")}
        wanted |= {("threads 2", f"zero {zero}") for zero in range(4)}
    assert wanted <= drawn
