"""llm.c as one of the compared programs: its CPU trainer train_gpt2.c, compiled by gcc and called in this process.

The user gives a checkout of https://github.com/karpathy/llm.c. It has no stable interface; commit f1e2ace works.
"""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from gpt2core.architecture import SUBLAYERS
from gpt2core.errors import ConfigError
from gpt2core.model import initial_parameters

SOURCE = "train_gpt2.c"
FLAGS = "-Ofast -march=native -fopenmp -DOMP".split()  # those of llm.c's Makefile, with gcc in place of clang
LIBRARY = "-shared -fPIC -fvisibility=hidden".split()  # hidden: functions may be inlined, as in a program
CALLS = r"""
#define TESTING /* omits main() */
#include "train_gpt2.c"
#define EXPORTED __attribute__((visibility("default")))
static GPT2 model;
EXPORTED void load(const char *checkpoint) { gpt2_build_from_checkpoint(&model, checkpoint); }
EXPORTED float train(int *inputs, int *targets, int batch_size, int seq_len, float lr, int step) {
    gpt2_forward(&model, inputs, targets, batch_size, seq_len);
    gpt2_zero_grad(&model);
    gpt2_backward(&model);
    gpt2_update(&model, lr, 0.9f, 0.999f, 1e-8f, 0.0f, step);
    return model.mean_loss;
}
"""
MAGIC, VERSION = 20240326, 3  # of a checkpoint in fp32
PADDING = 128  # the number of rows of the token embedding is a multiple of it


def require(folder, config):
    """Raise ConfigError if llm.c cannot be compiled from `folder`, or cannot train the model of `config`."""
    if not Path(folder, SOURCE).is_file():
        raise ConfigError(f"--llmc {folder} has no file {SOURCE}: give a checkout of github.com/karpathy/llm.c")
    if not shutil.which("gcc"):
        raise ConfigError(f"--llmc {folder}: gcc, which compiles llm.c, was not found: install it or omit the flag")
    if not (config.tied and config.learns_positions):
        raise ConfigError(f"--llmc {folder}: llm.c trains only models with a tied embedding: use --preset gpt2")


def build(folder, library):
    """Compile llm.c to the shared library `library`. Raises ConfigError with gcc's first error."""
    command = ["gcc", *FLAGS, *LIBRARY, "-x", "c", "-", "-I", Path(folder).absolute(), "-o", library, "-lm"]
    done = subprocess.run(command, input=CALLS, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error:" in line] or [f"status {done.returncode}"]
        raise ConfigError(f"--llmc {folder}: gcc cannot compile {SOURCE}: {errors[0]}: use commit f1e2ace of llm.c")


def write_checkpoint(path, config, parameters):
    """Write `parameters`, pairs (Hugging Face's name, float32 array), as a checkpoint that llm.c reads.

    A header of 256 int32; then each kind of parameter for all layers. llm.c stores a weight as (out, in).
    """
    arrays, C = dict(parameters), config.n_embd
    padding = -config.vocab_size % PADDING
    sizes = config.block_size, config.vocab_size, config.n_layer, config.n_head, C, config.vocab_size + padding
    header = np.zeros(256, np.int32)
    header[:8] = MAGIC, VERSION, *sizes
    ends = [f"{module}.{kind}" for each in SUBLAYERS for module in each.modules for kind in ("weight", "bias")]
    layers = [f"transformer.h.{layer}.{end}" for end in ends for layer in range(config.n_layer)]
    with open(path, "wb") as file:
        header.tofile(file)
        for name in ["transformer.wte.weight", "transformer.wpe.weight", *layers]:
            is_linear = ".h." in name and arrays[name].ndim == 2
            (arrays[name].T if is_linear else arrays[name]).tofile(file)
            if name == "transformer.wte.weight":
                np.zeros((padding, C), np.float32).tofile(file)
        for name in ("transformer.ln_f.weight", "transformer.ln_f.bias"):
            arrays[name].tofile(file)


def make_trainer(config, batch_size, seq_len, threads, folder):
    """Return `step(inputs, targets) -> loss`; the arguments are integer arrays (batch_size, seq_len).

    The initial weights, the learning rate and AdamW are those of harness/ours.py. OMP_NUM_THREADS of this process is
    the number of threads.
    """
    with tempfile.TemporaryDirectory() as temporary:
        library, checkpoint = Path(temporary, "llmc.so"), Path(temporary, "model.bin")
        build(folder, library)
        llmc = ctypes.CDLL(library)
        write_checkpoint(checkpoint, config, initial_parameters(config, seed=0))
        llmc.load(bytes(checkpoint))
    llmc.train.restype = ctypes.c_float
    steps = 0

    def step(inputs, targets):
        nonlocal steps
        steps += 1
        tokens = [np.ascontiguousarray(each, np.int32).ctypes for each in (inputs, targets)]
        pointers = [each.data_as(ctypes.c_void_p) for each in tokens]
        return llmc.train(*pointers, batch_size, seq_len, ctypes.c_float(3e-4), steps)

    return step
