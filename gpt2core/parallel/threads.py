"""The threads of one rank: each has a backend of its own and an equal part of every job."""

import contextvars
from concurrent.futures import ThreadPoolExecutor, wait

import threadpoolctl


def limit_blas(threads):
    """Tell the loaded BLAS how many threads it may use: more than there are cores for wait and spin for each other."""
    threadpoolctl.threadpool_limits(threads, user_api="blas")


class Workers:
    """`size` threads, one backend each. The calling thread waits; a failure in any of them is raised in it."""

    def __init__(self, backends):
        self.backends, self.size = list(backends), len(backends)
        self.pool = ThreadPoolExecutor(self.size, "worker") if self.size > 1 else None

    def map(self, function, *items):
        """[function(item, ...) for each worker]: in threads of their own, which see the caller's no_grad."""
        if self.pool is None:
            return [function(*each) for each in zip(*items, strict=True)]
        jobs = [self.pool.submit(contextvars.copy_context().run, function, *each) for each in zip(*items, strict=True)]
        while wait(jobs, 0.1).not_done:  # all, also after a failure: none may still be writing when the caller goes on
            pass  # woken now and then: a signal that came as this thread fell asleep is seen only when it wakes
        return [job.result() for job in jobs]

    def map_parts(self, function, arena, owner=0, owners=1):
        """[function(backend, part)]: what `owner` of `owners` has of the arena, in one slice for each worker."""
        parts = [arena.part(owner * self.size + i, owners * self.size) for i in range(self.size)]
        return self.map(function, self.backends, parts)

    def close(self):
        if self.pool:
            self.pool.shutdown()
