"""A stage as the two commands see it: its number, the classes that it consists of, and what messages say about it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What the scripts of a stage declare. Whatever only a command reads is here, not in kernels and collectives.

    number: 0 to 3; odd stages have many ranks, 2 and 3 compute on GPUs. backend: the class of the Backend, called as
    backend(precision, deterministic). world: the class of the Communicator; world() gives that of all ranks.
    """

    number: int
    backend: type
    world: Callable

    @property
    def name(self):
        """The name in directories of runs and of shipped weights, such as "stage1"."""
        return f"stage{self.number}"

    @property
    def many_ranks(self):
        """For messages: the stage with many ranks and the same kind of device, such as "stage 1"."""
        return f"stage {self.number | 1}"

    @property
    def has_transports(self):
        """Whether its ranks can exchange arrays in more than one way: only with one GPU for each rank."""
        return self.number == 3
