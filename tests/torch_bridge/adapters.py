"""The functions that the systems assignment's tests call, of both editions, for torch_bridge.

`make assignment SUITE=DIR` copies this file into a copy of the assignment's tests (tests/tools/assignment.py).
"""

import torch
from torch import nn

from torch_bridge.ddp import BucketedDDP, OverlapDDP
from torch_bridge.fsdp import FSDP
from torch_bridge.sharded_optimizer import ShardedOptimizer

# -- attention, both editions ------------------------------------------------------------------------------------------


def get_flashattention_autograd_function_pytorch():
    """The autograd function in PyTorch."""
    from torch_bridge.flash_attention import FlashAttention2Torch

    return FlashAttention2Torch


def get_flashattention_autograd_function_triton():
    """The autograd function in Triton."""
    from torch_bridge.flash_attention import FlashAttention2Triton

    return FlashAttention2Triton


get_flash_autograd_function_triton = get_flashattention_autograd_function_triton  # the name in the assignment's text

# -- data parallelism, edition of 2025 ---------------------------------------------------------------------------------


def get_ddp_individual_parameters(module):
    """The module with one all-reduce per parameter during backward."""
    return OverlapDDP(module)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    """Called between backward and step."""
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module, bucket_size_mb):
    """The module with one all-reduce per bucket during backward."""
    return BucketedDDP(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model, optimizer):
    """Called between backward and step."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    """Called at the start of a step: nothing is left to do."""


# -- data parallelism, edition of 2026 ---------------------------------------------------------------------------------


def get_ddp(module):
    """The module with one all-reduce per parameter during backward."""
    return OverlapDDP(module)


def ddp_on_after_backward(ddp_model, optimizer):
    """Called between backward and step."""
    ddp_model.finish_gradient_synchronization()


def get_fsdp(module, compute_dtype: torch.dtype | None = None):
    """The module with sharded weights. The units are also the assignment's own layers, which are not PyTorch's."""
    from cs336_basics.model import Embedding, Linear

    return FSDP(module, compute_dtype, shard=(nn.Linear, nn.Embedding, Linear, Embedding))


def fsdp_on_after_backward(fsdp_model, optimizer):
    """Called between backward and step."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model):
    """{name: whole parameter}."""
    return fsdp_model.gather_full_params()


# -- the optimizer, both editions --------------------------------------------------------------------------------------


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    """The optimizer with its state divided over the ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
