"""ZeRO-2 and 3, and several slices of a layer, with the kernels of a GPU, in Triton's interpreter: the same bits."""

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.app.planning.dry_run import layout_of
from gpt2core.app.planning.traffic import bytes_sent, traffic
from gpt2core.architecture import GPT2Config
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.mesh import Grid
from gpt2core.parallel.sharded.units import memory
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import current_model, parameter_hash, verify
from gpt2core.training_loop import read_batch
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.kernels.rounding import round_to_bf16
from stage2_cuda.runtime import triton_launch
from testing.fake_gpu import OnFakeGpu
from tests.support.rounding import Float32Copy

pytestmark = pytest.mark.skipif(
    not triton_launch.interpreted(), reason="needs the interpreter; test_nccl.py tests GPUs"
)

TOKENS = np.random.default_rng(0).integers(0, 24, 200)


class Rounded(CudaBackend):
    """Kernels read a copy with the values of bf16 numbers, in float32: the interpreter computes bf16 wrongly."""

    def __init__(self):
        super().__init__()
        self.compute_dtype, self.rounds_stochastically = Float32Copy(), True

    def cast(self, x, out, key=None, offset=0):
        if key is None:
            bits = x.view(np.uint32)
            rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        else:
            round_to_bf16(rounded := np.empty(x.shape, np.uint16), x, key, offset)
        out.view(np.uint32)[...] = rounded.astype(np.uint32) << 16

    def adamw_step(self, p, m, v, g, coefficients, factor, decays, betas, copy=None):
        super().adamw_step(p, m, v, g, coefficients, factor, decays, betas)
        self.cast(p, copy.array, copy.key, copy.offset)


class Half(CudaBackend):
    def __init__(self):
        super().__init__("fp16")


def make_trainer(
    world, backend, micro_batches=2, tied=False, layers=1, optimizer=None, loss_scale=None, heads=2, vocab_size=24,
    dropout=0.0, **parallel,
):  # fmt: skip
    config = GPT2Config(vocab_size, block_size=8, n_layer=layers, n_head=heads, n_embd=8 * heads, tied=tied)
    sizes = dict(batch_size=4, seq_len=8, micro_batches=micro_batches)
    optimizer = dict(clip=0.5, weight_decay=0.1, seed=5) | (optimizer or {})
    return Trainer(
        config, [backend()], **sizes, optimizer=optimizer, world=world, parallel=ParallelConfig(**parallel),
        loss_scale=loss_scale, dropout=dropout,
    )  # fmt: skip


def trained(world, *arguments, steps=2, **options):
    """What steps have computed, which must not depend on the number of ranks: their reports, parameters, the copy."""
    trainer, windows = make_trainer(world, *arguments, **options), Windows(TOKENS, 8)
    reports = [trainer.step(read_batch(trainer, windows), 1e-2) for _ in range(steps)]
    verify(trainer)
    copy = {name: tensor.numpy().tobytes() for name, tensor in current_model(trainer).parameters.items()}
    rows = [(step.loss, step.grad_norm, step.loss_scale, step.skipped) for step in reports]
    return rows, parameter_hash(trainer), copy


@pytest.mark.parametrize(
    "zero, tied, recompute",
    [pytest.param(2, True, "none", marks=pytest.mark.long), (3, False, "none"), (3, True, "block")],
)
def test_two_ranks_have_the_bits_of_one_in_fp32(zero, tied, recompute):
    want = trained(None, CudaBackend, tied=tied, recompute=recompute)
    got = run_ranks(2, lambda world: trained(world, CudaBackend, tied=tied, zero=zero, recompute=recompute))
    assert got == [want] * 2


@pytest.mark.long
@pytest.mark.parametrize("backend", [CudaBackend, Half, Rounded])
@pytest.mark.parametrize("how", [dict(tp=2), dict(pp=2)], ids=str)
def test_with_tensor_and_pipeline_parallelism_zero_3_changes_no_bit(how, backend):
    options = dict(tied=True, layers=2, micro_batches=4, **how)
    (want, *_) = run_ranks(2, lambda world: trained(world, backend, **options))
    assert run_ranks(4, lambda threads: trained(OnFakeGpu(threads), backend, zero=3, **options)) == [want] * 4


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.long), 3])
def test_an_overflow_in_fp16_repeats_the_step_on_all_ranks(zero):
    scale = dict(factor=2.0**20, interval=2)
    want = trained(None, Half, tied=True, steps=1, loss_scale=scale)
    assert want[0][0][2:] == (2.0**19, 1)  # the loss scale, and the repetitions
    got = run_ranks(2, lambda world: trained(world, Half, tied=True, steps=1, loss_scale=scale, zero=zero))
    assert got == [want] * 2


def test_a_fake_nccl_and_stochastic_rounding_have_the_bits_of_one_rank():
    """The fake checks addresses, counts and peers, and that events are recorded before a stream waits for them."""
    options = dict(micro_batches=4, optimizer=dict(rounding="stochastic"))
    want = trained(None, Rounded, **options)
    assert run_ranks(2, lambda threads: trained(OnFakeGpu(threads), Rounded, zero=3, **options)) == [want] * 2


def assert_predicted_bytes(trainer, place):
    step, layout = trainer.step(read_batch(trainer, Windows(TOKENS, 8)), 1e-2), layout_of(trainer)
    assert step.skipped == 0 and layout.compute_bytes == 2
    assert step.bytes_sent == bytes_sent(layout, place, traffic(layout, place), trainer.world.sent)


def test_in_fp16_the_parameters_are_sent_in_two_bytes_and_the_gradients_in_four():
    def sent(world):
        trainer = make_trainer(world, Half, zero=3)
        assert_predicted_bytes(trainer, Grid(data=world.rank))
        units = {unit: trainer.layout.whole_size(unit) for unit in trainer.layout.parts}
        return memory(trainer.accumulator.work, trainer.parallel.zero, trainer.pool.size), units

    for (shards, parameters, gradients), units in run_ranks(2, sent):
        largest = max(units.values())
        assert shards == (4 * 4 + 2) * sum(units.values()) / 2
        assert (parameters, gradients) == (2 * 2 * largest, 2 * 4 * largest)


# -- several slices of a layer -----------------------------------------------------------------------------------------

# slices of 7, 7, 7 and 6 tokens, or of 14 and 13
SLICED = dict(heads=4, vocab_size=27)


def on_fake_gpus(ranks, *arguments, **options):
    return run_ranks(ranks, lambda threads: trained(OnFakeGpu(threads), *arguments, **options))


@pytest.mark.parametrize(
    "backend, tied",
    [
        (CudaBackend, True),
        (Half, False),
        *(pytest.param(*row, marks=pytest.mark.long) for row in [(CudaBackend, False), (Half, True), (Rounded, True)]),
    ],
)
def test_two_slices_on_one_rank_have_the_bits_of_two_ranks(backend, tied):
    want = on_fake_gpus(2, backend, tied=tied, tp=2, **SLICED)
    assert [trained(None, backend, tied=tied, canonical_tp=2, **SLICED)] * 2 == want


FOUR = [  # (ranks, layout), all with the bits of tp = 4
    (1, {}), (2, dict(tp=2)), (2, dict(zero=3, recompute="block")), (4, dict(tp=2, pp=2)), (4, dict(tp=2, zero=2)),
    (2, dict(pp=2, pp_schedule="zero-bubble")), (2, dict(tp=2, zero=3)), (2, dict(zero=1, dp="bucket")),
]  # fmt: skip


@pytest.mark.parametrize("tied, backend, layouts", [
    (True, Half, FOUR[:4]),
    *(pytest.param(tied, each, FOUR, marks=pytest.mark.long) for tied in (False, True) for each in (Half, Rounded)),
])  # fmt: skip
def test_every_layout_of_four_slices_has_the_bits_of_four_ranks(tied, backend, layouts):
    """In 16 bits too: as the all-reduce of four ranks, the sums of slices are rounded once."""
    options = dict(tied=tied, layers=2, steps=1, **SLICED)
    (want, *_) = on_fake_gpus(4, backend, tp=4, **options)
    for ranks, layout in layouts:
        assert on_fake_gpus(ranks, backend, canonical_tp=4, **layout, **options) == [want] * ranks


@pytest.mark.long
def test_slices_have_the_bits_of_ranks_with_dropout():
    options = dict(tied=True, dropout=0.5, **SLICED)
    want = on_fake_gpus(2, Half, tp=2, **options)
    assert [trained(None, Half, canonical_tp=2, **options)] * 2 == want != on_fake_gpus(2, Half, tp=2, **SLICED)


def test_the_sums_of_slices_are_sent_in_four_bytes():
    def sent(world):
        assert_predicted_bytes(make_trainer(world, Half, tp=2, canonical_tp=4, **SLICED), Grid(tensor=world.rank))

    run_ranks(2, sent)
