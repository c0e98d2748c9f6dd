"""Speed-ups that have an ideal, and the CPU time of other programs: a speed-up above its ideal is not a result.

Other programs can make a run slower, but not faster. So if two ranks train 3.96 times as fast as one process, the run
of one process was disturbed, and every ratio to its time is too large.
"""

import os
import time
from dataclasses import dataclass

# Without other programs, a ratio of two medians exceeds its ideal only by noise and because two cores have two caches.
# The runs in results/ that have an ideal were measured on idle machines: none reaches it, and their quartiles are up to
# 6 % apart. Therefore a speed-up up to 5 % above its ideal is noise.
MARGIN = 1.05


@dataclass(frozen=True)
class Speedup:
    """The time of a reference / the time of a run. ideal: the largest speed-up of an undisturbed run.

    misled: whether another run with the same reference is above its ideal.
    """

    times: float
    ideal: float
    misled: bool = False

    @property
    def above(self):
        """Whether the speed-up is above its ideal by more than noise."""
        return not self.times <= MARGIN * self.ideal  # also if it is not a number

    @property
    def disturbed(self):
        return self.above or self.misled

    @property
    def reason(self):
        """Why a disturbed speed-up is not a result."""
        if self.above:
            return f"the ratio {self.times:.3g} of the times is above the ideal {self.ideal:g}"
        return "another run is faster than ideal relative to the same run"

    def cell(self, text):
        """The cell of a table: `text`, which has the number, marked if the speed-up is disturbed."""
        return f"disturbed ({text}; ideal: {self.ideal:g})" if self.disturbed else text

    def __str__(self):
        return (
            f"disturbed: {self.reason}" if self.disturbed else f"{self.times:.3g} times as fast (ideal: {self.ideal:g})"
        )


def speedups(reference, runs):
    """{name: Speedup} relative to one reference. reference: its time. runs: {name: (time, ideal)}."""
    return marked({name: (reference / seconds, ideal) for name, (seconds, ideal) in runs.items()})


def marked(ratios):
    """{name: Speedup} of ratios {name: (time of the reference / time of the run, ideal)} that have one reference."""
    found = {name: Speedup(times, ideal) for name, (times, ideal) in ratios.items()}
    misled = any(each.above for each in found.values())
    return {name: Speedup(each.times, each.ideal, misled) for name, each in found.items()}


class OtherPrograms:
    """The number of cores that other programs use, on average from the creation of this object to the call of cores().

    The CPU time of this process and of its child processes that have ended is not counted.
    """

    def __init__(self):
        self.started, self.all, self.own = time.monotonic(), busy_seconds(), sum(os.times()[:4])

    def cores(self):
        """None on a system without /proc/stat."""
        if self.all is None:
            return None
        used = busy_seconds() - self.all - (sum(os.times()[:4]) - self.own)
        return max(0.0, round(used / max(time.monotonic() - self.started, 1e-3), 2))


def busy_seconds():
    """The CPU seconds of all programs of this machine, with those that other virtual machines took; None if unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
