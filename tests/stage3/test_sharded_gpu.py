"""ZeRO-2 and ZeRO-3 with the kernels of a GPU, in Triton's interpreter: the bits of one rank, in every precision."""

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.architecture import GPT2Config
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import parameter_hash
from gpt2core.training_loop import read_batch
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.runtime import triton_launch

pytestmark = pytest.mark.skipif(
    not triton_launch.interpreted(), reason="needs the interpreter; test_nccl.py tests GPUs"
)

TOKENS = np.random.default_rng(0).integers(0, 24, 200)


def model(tied=False, layers=1):
    return GPT2Config(vocab_size=24, block_size=8, n_layer=layers, n_head=2, n_embd=16, tied=tied)


def make_trainer(world, backend, micro_batches=2, tied=False, optimizer=None, loss_scale=None, **parallel):
    sizes = dict(batch_size=4, seq_len=8, micro_batches=micro_batches)
    optimizer = dict(clip=0.5, weight_decay=0.1) | (optimizer or {})
    return Trainer(
        model(tied), [backend()], **sizes, optimizer=optimizer, world=world, parallel=ParallelConfig(**parallel),
        loss_scale=loss_scale,
    )  # fmt: skip


def trained(world, *arguments, steps=2, **options):
    """[(loss, gradient norm, hash of the parameters after the step) of each step]."""
    trainer, windows, rows = make_trainer(world, *arguments, **options), Windows(TOKENS, 8), []
    for _ in range(steps):
        step = trainer.step(read_batch(trainer, windows), 1e-3)
        rows.append((step.loss, step.grad_norm, parameter_hash(trainer)))
    return rows


@pytest.mark.parametrize("zero", [2, 3])
def test_two_ranks_have_the_bits_of_one_in_fp32(zero):
    want = trained(None, CudaBackend)
    assert run_ranks(2, lambda world: trained(world, CudaBackend, zero=zero)) == [want] * 2
