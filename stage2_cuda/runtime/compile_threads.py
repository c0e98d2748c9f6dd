"""Compile the kernels of a step in parallel threads, before the step launches them.

Triton compiles a kernel at its first launch, so a step would compile its kernels one after another. But a step reads
no device value on the host (it can be captured as a CUDA graph). Therefore the step's function can first be called
without launching anything, only to find its kernels. Threads compile them; then the function is called again, and each
launch waits for its own kernel. Triton's compiler and the programs that it starts release Python's global lock for most
of the time. If the kernels are in Triton's cache on disk, the threads only load them.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor, wait

MAX_THREADS = 16
SILENT = 0.5  # seconds: the user is notified of a longer wait for a kernel


class CompileThreads:
    """Threads that compile variants of kernels. notify(text) is called once if a launch must wait for long."""

    def __init__(self, notify):
        self.notify, self.notified = notify, False
        self.pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "compile")
        self.futures = {}  # {key of a variant: Future of compile()}

    def start(self, key, compile):
        """Call compile() in a thread, unless the variant with this key was started before."""
        if key not in self.futures:
            self.futures[key] = self.pool.submit(compile)

    def result(self, key):
        """Wait for the variant; returns the result of its compile(), or None if it was not started or has failed."""
        if key not in self.futures:
            return None
        with contextlib.suppress(Exception):  # the caller compiles again, which raises the error in its own thread
            self.wait_for([self.futures[key]])
            return self.futures[key].result()
        return None

    def wait_for_all(self):
        """Wait until no thread compiles."""
        self.wait_for(list(self.futures.values()))

    def wait_for(self, futures):
        """Wait for these futures, and notify the user if this takes long."""
        if not self.notified and wait(futures, SILENT).not_done:
            self.notified, count = True, sum(not future.done() for future in self.futures.values())
            self.notify(f"compiling {count} kernels for this GPU, only once: Triton keeps them in its cache directory")
        wait(futures)
