"""RunConfig: every setting of a training run, computed once on the root; only `out` may be set later."""

from dataclasses import dataclass, fields

from gpt2core.app.settings.definitions import TrainSettings
from gpt2core.architecture import GPT2Config
from gpt2core.optimizer import Schedule
from gpt2core.parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainSettings):
    """The settings of one training run, equal on all ranks, with their final values.

    `threads`, `micro_batches`, `bucket_mb` and `graph` may be None: then the trainer or the device chooses.
    """

    model: GPT2Config  # the sizes that are used; the size settings are None if they are not given

    @property
    def parallel(self):
        """The ParallelConfig with these settings."""
        return ParallelConfig(**{each.name: getattr(self, each.name) for each in fields(ParallelConfig)})

    @property
    def learning_rate(self):
        """The Schedule of the learning rate."""
        return Schedule(self.schedule, self.lr, self.min_lr, self.warmup, self.steps)

    @property
    def optimizer(self):
        """The argument `optimizer` of a trainer."""
        names = ("beta1", "beta2", "eps", "weight_decay", "clip", "rounding", "seed")
        return {name: getattr(self, name) for name in names}
