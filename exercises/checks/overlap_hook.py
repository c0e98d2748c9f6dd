"""Checks of exercise 3.3: which sums start when, and training with them."""

from types import SimpleNamespace

from exercises.checks.common import BUCKET_MB, expect_same_training
from exercises.compare import Mismatch, expect_equal
from gpt2core.arena import Arena
from gpt2core.parallel.config import ParallelConfig

NAMES = "abcde"  # five parameters of one block each; backward completes them from the last to the first
BUCKETS = [["e"], ["d", "c"], ["b", "a"]]


class Recorded:
    """A DataParallel of the student whose reduce_start records its calls.

    events: ("start", k) when the sum of bucket k is started, ("wait", k) when its handle is waited for.
    """

    def __init__(self, eager):
        from gpt2core.parallel.data.strategies import DataParallel

        arena, self.events = Arena([(name, (10,)) for name in NAMES]), []
        self.data = DataParallel(arena, BUCKETS, self.start, eager)

    def start(self, part):
        number = next((k for k, known in enumerate(self.data.parts) if known == part), None)
        if number is None:
            raise Mismatch(f"reduce_start({part}) is not called with the slice of a bucket", "Use self.parts[number].")
        self.events.append(("start", number))
        return SimpleNamespace(wait=lambda: self.events.append(("wait", number)))

    def backward(self):
        """Complete all gradients; returns the events after each."""
        found = {}
        for name in reversed(NAMES):
            self.data.completed(name)
            found[name] = list(self.events)
        return found


def hook_starts():
    found, starts = Recorded(eager=True).backward(), [("start", 0)]
    first = [("start", 0), ("start", 1)]
    for name, want in (("e", starts), ("d", starts), ("c", first), ("b", first), ("a", [*first, ("start", 2)])):
        early = "The sum of a bucket starts before all its gradients are complete: count the missing ones."
        wrong = [
            ([], "No sum starts during backward: start it when the bucket's last gradient is complete, if self.eager."),
            (first, early),
            ([*first, ("start", 2)], early),
            ([*starts, ("start", 1), ("start", 1)], "A bucket is summed twice."),
            (
                [("start", 0), ("wait", 0)],
                "The hook waits for the sum: only finish() waits, so that backward continues.",
            ),
        ]
        look = "DataParallel.completed: self.missing counts the incomplete gradients of each bucket"
        expect_equal(f"after the gradient of {name!r}, the calls", found[name], want, wrong, look)


WAITS = [("wait", 0), ("wait", 1), ("wait", 2)]


def hook_finish():
    recorded = Recorded(eager=True)
    recorded.backward()
    before = len(recorded.events)
    recorded.data.finish()
    wrong = [
        ([], "finish() does not wait: call wait() of every handle that was started."),
        (WAITS[:2], "finish() does not wait for the last sum."),
        (
            [each for k in range(3) for each in (("start", k), ("wait", k))],
            "finish() starts the sums again: a bucket is summed twice.",
        ),
    ]
    look = "DataParallel.finish"
    expect_equal("with eager, the calls of finish()", sorted(recorded.events[before:]), WAITS, wrong, look)
    recorded = Recorded(eager=False)
    found = recorded.backward()["a"]
    hint = "Without eager no sum starts during backward: test self.eager in completed()."
    expect_equal("without eager, the calls during backward", found, [], [(found, hint)] if found else (), look)
    recorded.data.finish()
    starts = [("start", k) for k in range(3)]
    wrong = [
        ([], "Without eager, finish() must start the sum of every part, and wait for it."),
        (starts, "finish() starts the sums, but does not wait for them."),
    ]
    expect_equal("without eager, the calls of finish()", sorted(recorded.events), starts + WAITS, wrong, look)


def hook_second_step():
    for eager in (True, False):
        recorded = Recorded(eager)
        recorded.backward()
        recorded.data.finish()
        first = list(recorded.events)
        recorded.events.clear()
        recorded.backward()
        recorded.data.finish()
        wrong = [
            (
                [each for each in first if each[0] == "wait"],
                "In the second step no sum starts: finish() must set self.missing back.",
            ),
            ([], "In the second step nothing happens: finish() must set self.missing and self.handles back."),
            (
                sorted([*first, *WAITS]),
                "The handles of the first step are waited for again: finish() must empty self.handles.",
            ),
        ]
        look = "the end of DataParallel.finish, which prepares the next step"
        name = f"with eager={eager}, the calls of the second step"
        expect_equal(name, sorted(recorded.events), sorted(first), [(sorted(w), h) for w, h in wrong], look)


def hook_training():
    look = "completed and finish: is every bucket summed exactly once in each step?"
    for strategy in ("overlap", "bucket", "flat"):
        expect_same_training(ParallelConfig(dp=strategy, bucket_mb=BUCKET_MB), look)
