"""FlatLayout: what a rank stores of the parameters, the gradients, or the moments, in one flat array each."""

from abc import ABC, abstractmethod


class FlatLayout(ABC):
    """The layout of flat arrays of `size` elements in pages (arena.py). ArenaLayout: all elements. UnitShards: shards.

    arena: the DividedArena of the whole parameters of this rank. own: the slice of a flat array that this rank updates.
    owner: a number that is equal on two ranks if they store the same elements. DividedOptimizer reads the methods.
    """

    @abstractmethod
    def shares(self, workers):
        """The slices of a flat array that the worker threads of this rank update; together they are `own`."""

    @abstractmethod
    def runs(self, share):
        """[(slice, index of its first element in the arena)]: the parts of a share that are contiguous in the arena."""

    def pages(self, share):
        """The slice of the pages of a share."""
        return self.arena.pages(share)

    @abstractmethod
    def decays(self):
        """int32, of each page: whether its parameters decay; see Arena.decays."""

    @abstractmethod
    def padding(self):
        """The slices of a flat array that have no parameter."""

    @abstractmethod
    def join(self, sums):
        """The page sums of the model as on one rank, from those of `own`. All ranks call this method."""

    @abstractmethod
    def gather(self, flat):
        """Copy what other ranks have updated to this rank, if it stores it too. All ranks call this method."""

    @abstractmethod
    def gather_own(self, own, on_host=True):
        """A flat array, from arrays of the size of `own`; it may be on the host if `on_host`. All ranks call it."""

    @abstractmethod
    def put(self, flat, name, array):
        """Copy what this rank stores of a parameter into `flat`. array: the whole parameter, on the host."""

    @abstractmethod
    def whole(self, flat):
        """The flat array of the whole arena. All ranks call this method."""
