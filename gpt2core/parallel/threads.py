"""The threads of one rank: each worker thread has a backend of its own and an equal part of every job."""

import contextvars
from concurrent.futures import ThreadPoolExecutor, wait

import threadpoolctl


def limit_blas(threads):
    """Set the number of threads of the loaded BLAS: with more threads than cores, BLAS wastes time in busy waits."""
    threadpoolctl.threadpool_limits(threads, user_api="blas")


class WorkerPool:
    """`size` threads, one backend each. The calling thread waits for all of them and raises the first exception."""

    def __init__(self, backends):
        self.backends, self.size = list(backends), len(backends)
        self.pool = ThreadPoolExecutor(self.size, "worker") if self.size > 1 else None

    def map(self, function, *items):
        """[function(item, ...) for each worker], each in its own thread, with the caller's context (no_grad)."""
        if self.pool is None:
            return [function(*each) for each in zip(*items, strict=True)]
        jobs = [self.pool.submit(contextvars.copy_context().run, function, *each) for each in zip(*items, strict=True)]
        while wait(jobs, 0.1).not_done:  # wait for all, also after a failure: no job may write afterwards
            pass  # the timeout lets Python handle a signal that arrives during the wait
        return [job.result() for job in jobs]

    def map_parts(self, function, arena, owner=0, owners=1):
        """[function(backend, part)] over the part of the arena of `owner` of `owners`, one slice per worker."""
        parts = [arena.part(owner * self.size + i, owners * self.size) for i in range(self.size)]
        return self.map(function, self.backends, parts)

    def close(self):
        if self.pool:
            self.pool.shutdown()
