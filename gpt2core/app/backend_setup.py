"""The backends of one rank as the flags ask for them, and the error of a device that runs out of memory."""

import contextlib

from gpt2core.errors import ConfigError, DeviceMemoryError


def usable_threads(make_backend, requested, cores):
    """How many threads can share this rank's work: --threads (`requested`, or None), else its cores.

    A backend that does not use threads has 1; raises ConfigError where --threads is given for it.
    """
    if make_backend.uses_threads:
        return requested or cores
    if requested:
        raise ConfigError(
            f"--threads {requested} has no meaning here: the device processes the whole batch; omit the flag"
        )
    return 1


def make_backends(make_backend, config, threads):
    """One backend for each thread, set up as the RunConfig says; raises ConfigError."""
    backends = [make_backend(config.precision, config.deterministic) for _ in range(threads)]
    check_graph(config, backends[0])
    for backend in backends:
        if config.nvtx:
            backend.runtime.annotate(backend)
        if config.autotune:
            backend.runtime.retune()
    return backends


def check_graph(config, backend):
    """Raise ConfigError for --graph or --no-graph where no step is recorded, and for --nvtx where one is."""
    if config.graph is not None and not backend.runtime.records:
        name = "--graph" if config.graph else "--no-graph"
        raise ConfigError(f"{name} has no meaning here: {backend.name} records no step; omit the flag")
    if config.nvtx and backend.runtime.records and config.graph is not False:
        raise ConfigError("--nvtx names nothing in a step that is replayed from a CUDA graph: add --no-graph")


@contextlib.contextmanager
def memory_errors(backend, config, *sizes, **options):
    """Convert the device's out-of-memory errors to DeviceMemoryError, with the backend's advice on sizes that fit.

    config: GPT2Config; sizes and options: the other arguments of Backend.out_of_memory.
    """
    try:
        yield
    except Exception as error:
        if (advice := backend.runtime.explain_oom(error, config, *sizes, **options)) is None:
            raise
        raise DeviceMemoryError(advice) from error


def step_sizes(config, micro_batches, replicas):
    """The sizes of a training step for memory_errors(): micro-batches in all, data-parallel replicas."""
    # where MPI carries the arrays, the canonical sum is computed on the host and takes no device memory
    sums_on_device = config.transport == "nccl" and config.collectives == "canonical"
    return config.batch_size, config.seq_len, micro_batches, replicas, config.parallel, sums_on_device
