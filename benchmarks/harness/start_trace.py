"""Run a module as a program and record when its imports and some of its functions begin and how long they take.

    python -m benchmarks.harness.start_trace FILE.json MODULE [arguments of the program]

FILE receives a list of [label, thread, start, seconds]. `start` is in seconds since the parent process set START to its
time.monotonic(), which all processes of a machine share. Only the standard library is imported here, because any other
import would be missing from the record.
"""

import functools
import importlib
import importlib.util
import json
import os
import sys
import threading
import time

START = "STAGED_GPT2_TRACE_START"
IMPORTS = "numpy", "torch", "triton", "cupy", "tokenizers", "stage2_cuda.cuda_backend", "gpt2core.app.cli"
# module: its functions and methods to record. A function that a module imported by name is listed under this module.
FUNCTIONS = {
    "gpt2core.app.inference.inference_command": "load_checkpoint make_inference_backend read_request load_model "
    "write_text",
    "gpt2core.app.training.setup": "read_inputs make_trainer",
    "gpt2core.app.training.command": "run_steps write_sample",
    "gpt2core.app.training.background_writer": "save_checkpoint",
    "stage2_cuda.runtime.triton_launch": "GpuLauncher.__init__ start_driver triton_utils cupy_driver "
    "GpuLauncher.compile_ahead GpuLauncher.new_variant GpuLauncher.load",
    "stage2_cuda.runtime.compile_threads": "CompileThreads.wait_for",
    "stage2_cuda.runtime.triton_start": "inspect_first_argument key_of_files read_compiler_version",
    "stage2_cuda.cuda_runtime": "CudaRuntime.__init__ SideStream.__init__",
    "stage2_cuda.runtime.cuda_graph": "CapturedStep.__init__ CapturedStep.capture StaticInputs",
    "stage2_cuda.gemm.cublaslt": "load_library CublasLt.__init__ CublasLt._choose_algorithm",
    "stage2_cuda.tuning.tuner": "Tuner.time_candidates medians check",
    "stage2_cuda.decoding.decoder": "GpuDecoder.__init__ GpuDecoder.start GpuDecoder.step GpuDecoder.read_tokens",
    "triton.compiler.compiler": "compile ASTSource.hash CompiledKernel._init_handles",
    "triton.runtime.build": "_build",
    "cupy.cuda.compiler": "_compile_module_with_cache compile_using_nvrtc",
}


def main():
    path, module, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0], started, events = module, float(os.environ[START]), []

    def record(label, begin):
        thread = "main" if threading.current_thread() is threading.main_thread() else "other"
        events.append([label, thread, begin - started, time.monotonic() - begin])

    record("start of Python", time.monotonic())
    sys.meta_path.insert(0, Finder(record))
    try:
        importlib.import_module(module).main()
    finally:
        record("end of the program", time.monotonic())
        with open(path, "w") as file:
            json.dump(events, file)


class Finder:
    """Finds the listed modules as Python does, and records their import and the calls of their functions."""

    def __init__(self, record):
        self.record, self.entered = record, set()

    def find_spec(self, name, path=None, target=None):
        if name in self.entered or not (name in IMPORTS or name in FUNCTIONS):
            return None
        self.entered.add(name)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(self.execute, execute)
        return spec

    def execute(self, execute, module):
        begin, name = time.monotonic(), module.__name__
        execute(module)
        if name in IMPORTS:
            self.record(f"import {name}", begin)
        for path in FUNCTIONS.get(name, "").split():
            *owners, attribute = path.split(".")
            owner = functools.reduce(getattr, owners, module)
            if hasattr(owner, attribute):  # a library of another version may lack it
                setattr(owner, attribute, self.timed(path.removesuffix(".__init__"), getattr(owner, attribute)))

    def timed(self, label, function):
        @functools.wraps(function)
        def call(*args, **options):
            begin = time.monotonic()
            try:
                return function(*args, **options)
            finally:
                self.record(label, begin)

        return call


if __name__ == "__main__":
    main()
