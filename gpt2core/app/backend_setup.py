"""Create the backends of one rank from the flags, and convert out-of-memory errors of the device."""

import contextlib

from gpt2core.errors import ConfigError, DeviceMemoryError


def usable_cores(config, cores):
    """How many of the `cores` of this rank training uses without --threads: in a pipeline and with ZeRO-2 and 3, one.

    In both, all ranks need the same number, and ranks may have different numbers of cores. In a pipeline each thread
    needs as many micro-batches as there are ranks, so more threads could be refused. With ZeRO-2 and 3, each thread
    needs memory for whole gradients.
    """
    return 1 if config.pp > 1 or config.zero > 1 else cores


def usable_threads(make_backend, requested, cores):
    """The number of threads for this rank's work: `requested` (--threads), or `cores` if `requested` is None.

    For a backend that does not use threads the result is 1, and ConfigError is raised if --threads is given.
    """
    if make_backend.uses_threads:
        return requested or cores
    if requested:
        raise ConfigError(
            f"--threads {requested} has no meaning here: the device processes the whole batch; omit the flag"
        )
    return 1


def make_backends(make_backend, config, threads):
    """A list of `threads` backends with the options of `config`, a RunConfig.

    Raises ConfigError for an option that this kind of backend does not support.
    """
    backends = [make_backend(config.precision, config.deterministic) for _ in range(threads)]
    check_graph(config, backends[0])
    for backend in backends:
        if config.blas:
            backend.runtime.use_blas(config.blas)
        if config.nvtx:
            backend.runtime.annotate(backend)
        if config.autotune:
            backend.runtime.retune()
    return backends


def check_graph(config, backend):
    """Raise ConfigError for --graph or --no-graph on a backend without CUDA graphs, and for what excludes graphs."""
    if config.graph is not None and not backend.runtime.uses_graphs:
        name = "--graph" if config.graph else "--no-graph"
        raise ConfigError(f"{name} has no meaning here: {backend.name} has no CUDA graphs; omit the flag")
    if config.graph and config.sparse_embedding:
        raise ConfigError(
            "`graph=True` and `sparse_embedding=True` exclude each other, because the number of rows differs between "
            "steps: use `graph=False`"
        )
    if config.nvtx and backend.runtime.uses_graphs and config.graph is not False:
        raise ConfigError("--nvtx has no effect on a step that is replayed from a CUDA graph: add --no-graph")


@contextlib.contextmanager
def memory_errors(backend, config, *sizes, **options):
    """In this context, convert out-of-memory errors of the device to DeviceMemoryError.

    The message of this error comes from Runtime.explain_oom() and advises sizes that would fit. config: the GPT2Config.
    sizes, options: the other arguments of explain_oom().
    """
    try:
        yield
    except Exception as error:
        if (advice := backend.runtime.explain_oom(error, config, *sizes, **options)) is None:
            raise
        raise DeviceMemoryError(advice) from error


def step_sizes(config, micro_batches, replicas):
    """The argument `sizes` of memory_errors() for a training step of a RunConfig.

    micro_batches: the number of micro-batches over all ranks. replicas: the number of data-parallel replicas.
    """
    # With the transport mpi the canonical sum is computed on the host and needs no device memory.
    sums_on_device = config.transport == "nccl" and config.collectives == "canonical"
    return config.batch_size, config.seq_len, micro_batches, replicas, config.parallel, sums_on_device
