"""The worker threads of one rank: each thread has a backend of its own and computes an equal part of the work."""

import contextlib
import contextvars
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import threadpoolctl


def cores_of_process():
    """The numbers of the cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def limit_blas(threads):
    """Set the number of threads of BLAS. With more threads than cores, BLAS loses much time in busy waiting."""
    threadpoolctl.threadpool_limits(threads, user_api="blas")


@contextlib.contextmanager
def abort_on_error(barrier):
    """In this context of one of the threads that wait at a threading.Barrier: an error lets the others return soon.

    They leave the context without an error, because that of the first thread is raised.
    """
    try:
        yield
    except threading.BrokenBarrierError:
        pass  # another thread has raised an error
    except BaseException:
        barrier.abort()
        raise


class WorkerPool:
    """`size` worker threads, one for each backend.

    blas_threads: if given, BLAS uses so many threads from now on, in the whole process: 1 leaves the cores to the
    workers, and a product has the same bits for any number of workers.
    """

    def __init__(self, backends, blas_threads=None):
        self.backends, self.size = list(backends), len(backends)
        if blas_threads is not None:
            limit_blas(blas_threads)
        self.executor = ThreadPoolExecutor(self.size, "worker") if self.size > 1 else None
        self.unfinished = []  # the calls of a map() that has raised before their end

    def map(self, function, *items, barrier=None):
        """[function(item, ...) of each worker]; each of `items` is a list that has one element for each worker.

        A worker's call runs in its thread, with the caller's context variables, so that no_grad() applies there too.
        Waits for all calls, also after one has failed, and raises the first exception. If this wait is interrupted, for
        example by Ctrl-C, map() raises at once, the calls continue, and the next map() waits for them first.

        barrier: a threading.Barrier at which the calls wait for each other. After an error of one call they leave it;
        a call that waits for something else, such as a message, continues as after an interruption.
        """
        self.wait()
        function = abort_on_error(barrier)(function) if barrier else function
        calls, jobs = list(zip(*items, strict=True)), []  # calls: the arguments of each worker's call
        if self.executor is None:
            return [function(*arguments) for arguments in calls]
        try:
            for arguments in calls:
                jobs.append(self.executor.submit(contextvars.copy_context().run, function, *arguments))
            while wait(jobs, 0.1).not_done and not (barrier and any(map(has_failed, jobs))):
                pass  # because of the timeout, Python can handle a signal that arrives during the wait
        except BaseException:  # KeyboardInterrupt, or a thread cannot be started
            self.unfinished = jobs
            raise
        self.unfinished = [job for job in jobs if not job.done()]
        return [job.result() for job in jobs if job.done()]

    def wait(self):
        """Wait for the calls that a map() has left unfinished; their results and errors are ignored."""
        if self.unfinished:
            wait(self.unfinished)
            self.unfinished = []

    def close(self):
        if self.executor:
            self.executor.shutdown()


def has_failed(job):
    return job.done() and job.exception() is not None
