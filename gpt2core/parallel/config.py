"""ParallelConfig: how a training step is divided over ranks and time, and which options fit together."""

from dataclasses import dataclass

from gpt2core.errors import ConfigError, counted, require_size

STRATEGIES = {  # name: (packed: several parameters in a message, eager: messages are sent during backward)
    "naive": (False, False),
    "flat": (True, False),
    "overlap": (False, True),
    "bucket": (True, True),
}
BUCKET_MB = 25.0  # 10^6 bytes; PyTorch's DistributedDataParallel has 25 MiB
ZERO = 0, 1, 2, 3
RECOMPUTE = "none", "block"  # what backward computes again
PP_SCHEDULES = "gpipe", "1f1b", "interleaved", "zero-bubble"
GATHERS = "end", "forward"


@dataclass(frozen=True)
class ParallelConfig:
    """How a step is divided. The defaults are valid for any number of ranks, including one.

    Raises ConfigError for unknown values, and for options that exclude each other.
    """

    tp: int = 1  # number of ranks that divide each layer (tensor parallelism); world.size / (tp pp) model replicas
    dp: str = "flat"  # how gradients are summed over the replicas: see STRATEGIES
    bucket_mb: float | None = BUCKET_MB  # minimum bucket size in 10^6 bytes; None: measure the best size
    compress: str = "none"  # format of gradients in messages: none (fp32), fp16, bf16, int8
    zero: int = 0  # a rank stores only its share of: 1: the moments of AdamW, 2: gradients too, 3: parameters too
    zero_gather: str = "end"  # with zero 1, parameters are all-gathered at the "end" of a step or in the next "forward"
    recompute: str = "none"  # "block": keep only the input of a block in forward, compute the block again in backward
    pp: int = 1  # number of ranks that divide the layers (pipeline parallelism); 1: no pipeline
    pp_schedule: str = "1f1b"  # the order in which a rank computes: see PP_SCHEDULES
    chunks: int | None = None  # of the layers of each of these ranks; None: 2 with schedule "interleaved", otherwise 1
    canonical_tp: int | None = None  # S: each layer is S slices, with the bits of `tp=S` for any tp; None: tp
    sparse_embedding: bool = False  # exchange only the rows of the embedding's gradient that are not zero

    def __post_init__(self):
        if self.chunks is None:
            object.__setattr__(self, "chunks", 2 if self.pp_schedule == "interleaved" else 1)
        if self.canonical_tp is None:
            object.__setattr__(self, "canonical_tp", self.tp)
        for name in ("tp", "canonical_tp", "pp", "chunks"):
            require_size(name, getattr(self, name))
        known = dict(dp=STRATEGIES, zero=ZERO, zero_gather=GATHERS, recompute=RECOMPUTE, pp_schedule=PP_SCHEDULES)
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"`{name}={getattr(self, name)}` is unknown: choose from {', '.join(map(str, values))}"
                )
        self.check_pairs()

    @property
    def slices(self):
        """The slices of each layer that a rank computes one after another."""
        return self.canonical_tp // self.tp

    def check_pairs(self):
        """Raise ConfigError for two options that exclude each other."""
        if self.canonical_tp % self.tp:
            raise ConfigError(
                f"`canonical_tp={self.canonical_tp}` is not a multiple of `tp={self.tp}`: use "
                f"`canonical_tp={2 * self.tp}` or another multiple"
            )
        if not are_slices_of(self.canonical_tp, self.tp):
            raise ConfigError(
                f"`canonical_tp={self.canonical_tp}` makes {self.slices} slices on each rank of `tp={self.tp}`, but "
                f"their number must be a power of two: use `canonical_tp={2 * self.tp}` or `tp={self.canonical_tp}`"
            )
        if self.zero_gather == "forward" and not self.zero:
            raise ConfigError("`zero_gather=forward` needs `zero=1`, and this is `zero=0`: add `zero=1`, or use end")
        if self.pp > 1:
            if self.chunks > 1 and self.pp_schedule != "interleaved":
                raise ConfigError(
                    f"`chunks={self.chunks}` and `pp_schedule={self.pp_schedule}`: use `chunks=1`, or "
                    f"`pp_schedule=interleaved`"
                )
            self.refuse("pp", "pp=1", zero_gather="end", compress="none")
        if self.zero > 1:
            self.refuse("zero", "zero=1", dp="flat", zero_gather="end", compress="none", sparse_embedding=False)
        if self.sparse_embedding:
            self.refuse("sparse_embedding", "sparse_embedding=False", compress="none", canonical_tp=self.tp)
            if self.zero and self.dp == "flat":  # a rank receives only its own share of one message
                raise ConfigError(
                    "`sparse_embedding=True` and `zero=1` need `dp=bucket`, not `dp=flat`; or use `zero=0`"
                )

    def refuse(self, option, otherwise, **only):
        """Raise ConfigError if an option has another value than the only one that fits together with `option`."""
        for name, value in only.items():
            if (given := getattr(self, name)) != value:
                raise ConfigError(
                    f"`{option}={getattr(self, option)}` and `{name}={given}` exclude each other: use "
                    f"`{name}={value}` or `{otherwise}`"
                )

    def check_run(self, config, threads, count, replicas):
        """Raise ConfigError if a run does not fit: the layers of `config`, the threads of a rank, or the micro-batches.

        count: the number of micro-batches of each of the `replicas`.
        """
        pp = self.pp
        if self.sparse_embedding and config.tied:
            raise ConfigError(
                "`sparse_embedding=True` and a model with tied=True exclude each other: a tied table is also the "
                "matrix of the logits, so its gradient has no zero rows; use `sparse_embedding=False`"
            )
        if pp > 1 and config.n_layer < pp * self.chunks:
            raise ConfigError(
                f"`n_layer={config.n_layer}` is less than {pp * self.chunks}, the number of chunks on `pp={pp}` ranks "
                f"with {counted(self.chunks, 'chunk')} each: use fewer ranks or chunks"
            )
        each = count // threads
        owner = "each thread of a replica" if threads > 1 else "each replica"
        if each < pp:
            raise ConfigError(
                f"{owner} has {counted(each, 'micro-batch')}, fewer than `pp={pp}`: use "
                f"`micro_batches={pp * threads * replicas}` or more"
            )
        if pp > 1 and self.pp_schedule == "interleaved" and each % pp:
            raise ConfigError(
                f"`pp_schedule=interleaved`: {owner} has {counted(each, 'micro-batch')}, not divisible by "
                f"`pp={pp}` ranks: use `micro_batches={each // pp * pp * threads * replicas}`"
            )


def are_slices_of(count, tp):
    """Whether `tp` ranks can divide `count` slices: each rank must add a whole subtree of the canonical sum."""
    each = count // tp
    return count % tp == 0 and (tp == 1 or each & (each - 1) == 0)
