"""Create the backends of one rank from the flags, and convert out-of-memory errors of the device."""

import contextlib

from gpt2core.errors import ConfigError, DeviceMemoryError


def usable_threads(make_backend, requested, cores):
    """The number of threads for this rank's work: `requested` (--threads) unless it is None, otherwise `cores`.

    A backend that does not use threads gets 1, and ConfigError is raised if --threads is given.
    """
    if make_backend.uses_threads:
        return requested or cores
    if requested:
        raise ConfigError(
            f"--threads {requested} has no meaning here: the device processes the whole batch; omit the flag"
        )
    return 1


def make_backends(make_backend, config, threads):
    """One backend per thread, with the options of a RunConfig; raises ConfigError for an option that it lacks."""
    backends = [make_backend(config.precision, config.deterministic) for _ in range(threads)]
    check_graph(config, backends[0])
    for backend in backends:
        if config.nvtx:
            backend.runtime.annotate(backend)
        if config.autotune:
            backend.runtime.retune()
    return backends


def check_graph(config, backend):
    """Raise ConfigError for --graph or --no-graph on a backend without CUDA graphs, and for --nvtx with a graph."""
    if config.graph is not None and not backend.runtime.uses_graphs:
        name = "--graph" if config.graph else "--no-graph"
        raise ConfigError(f"{name} has no meaning here: {backend.name} has no CUDA graphs; omit the flag")
    if config.nvtx and backend.runtime.uses_graphs and config.graph is not False:
        raise ConfigError("--nvtx has no effect on a step that is replayed from a CUDA graph: add --no-graph")


@contextlib.contextmanager
def memory_errors(backend, config, *sizes, **options):
    """Convert the device's out-of-memory errors to DeviceMemoryError, with advice on sizes that fit.

    config: GPT2Config; sizes and options: the other arguments of Runtime.explain_oom.
    """
    try:
        yield
    except Exception as error:
        if (advice := backend.runtime.explain_oom(error, config, *sizes, **options)) is None:
            raise
        raise DeviceMemoryError(advice) from error


def step_sizes(config, micro_batches, replicas):
    """The sizes of a training step for memory_errors(); micro_batches: in total; replicas: data-parallel replicas."""
    # with --transport mpi the canonical sum is computed on the host and takes no device memory
    sums_on_device = config.transport == "nccl" and config.collectives == "canonical"
    return config.batch_size, config.seq_len, micro_batches, replicas, config.parallel, sums_on_device
