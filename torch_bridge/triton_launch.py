"""Launch the project's Triton kernels on PyTorch tensors, on PyTorch's current stream.

Stage 2 replaces Triton's driver and allocator for its process, because it uses CuPy. This module changes neither, and
passes the stream with each launch. It therefore works in a process that also runs stage 2 or kernels of inductor.
"""

import torch
import triton


def interpreted():
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET was set when Triton was imported."""
    return triton.knobs.runtime.interpret


def check_equal_kinds(**tensors):
    """Raise TypeError or ValueError, naming both values, unless all tensors have the dtype and device of the first."""
    (first_name, first), *others = tensors.items()
    for name, x in others:
        if x.dtype != first.dtype:
            raise TypeError(f"{first_name} has dtype {first.dtype}, {name} has {x.dtype}: convert one of them")
        if x.device != first.device:
            raise ValueError(f"{first_name} is on {first.device}, {name} is on {x.device}: move one of them")


def check_device(x, name, alternative):
    """Raise ValueError or TypeError unless kernels can run on tensor x.

    name: the function that the user called, alternative: what runs on any device, both for the message.
    """
    if not interpreted() and x.device.type != "cuda":
        raise ValueError(
            f"{name} needs a CUDA tensor, the first one is on {x.device}: use {alternative}, or set TRITON_INTERPRET=1 "
            "before Python starts"
        )
    if interpreted() and x.dtype == torch.bfloat16:
        raise TypeError(f"{name}: {x.dtype} is silently wrong in Triton's interpreter: use float32, or a GPU")


def launch(kernel, grid, arguments, options, device):
    """Run kernel[grid] on the current stream of `device`. grid: 1 to 3 integers.

    arguments: tensors, int, float, None or TensorDescriptors, for all parameters of the kernel except its constants.
    options: the constants (annotated tl.constexpr, last in the signature) and launch parameters such as num_warps.
    """
    if interpreted():
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(device):  # Triton compiles for, and loads onto, the current device
        compiled = compiled_variant(kernel, grid, arguments, options)
        constants = [options[name] for name in kernel.arg_names[len(arguments) :]]
        stream = torch.cuda.current_stream(device).cuda_stream
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants, stream=stream)


def compiled_variant(kernel, grid, arguments, options):
    """The compiled kernel for these arguments: Triton compiles a variant for each set of dtypes and constants."""
    return kernel.warmup(*arguments, grid=grid, enable_fp_fusion=True, **options)  # without it Triton 3.9 warns
