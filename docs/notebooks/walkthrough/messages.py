"""Run a collective on threads and compute when each of its messages would be sent in the alpha-beta model.

A message of m bytes takes alpha + beta m seconds. A rank sends one message at a time and receives one at a time, and it
can do both at once. Additions take no time.
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from gpt2core.communicator import Communicator, Handle
from gpt2core.parallel.thread_communicator import run_ranks
from walkthrough.setup import show

DATA, TIMES = 0, 1  # tags: the messages of the collective, and for each of them the time at which it ends


class Message(NamedTuple):
    """One message: ranks, bytes, and the times in seconds at which it begins and ends."""

    source: int
    to: int
    nbytes: int
    begin: float
    end: float


class TimedCommunicator(Communicator):
    """A rank of a group of threads whose messages have the times of the alpha-beta model; `clock` is its time now."""

    def __init__(self, group, alpha, beta):
        self.group, self.alpha, self.beta = group, alpha, beta
        self.rank, self.size = group.rank, group.size
        self.clock = self.sending = self.receiving = 0.0  # sending, receiving: when the last message has ended
        self.messages = []  # the messages that this rank has received

    def send_start(self, x, to, tag=DATA):
        self.sending = max(self.clock, self.sending) + self.alpha + self.beta * x.nbytes
        times = np.array([self.clock, self.sending])
        handles = [self.group.send_start(x, to, DATA), self.group.send_start(times, to, TIMES)]
        return _Sent(self, handles, self.sending)

    def recv_start(self, out, source, tag=DATA):
        times = np.empty(2)
        handles = [self.group.recv_start(out, source, DATA), self.group.recv_start(times, source, TIMES)]
        return _Received(self, handles, source, out, times)


class _Sent(Handle):
    def __init__(self, comm, handles, end):
        super().__init__()
        self.comm, self.handles, self.end = comm, handles, end

    def wait(self):
        for handle in self.handles:
            handle.wait()
        self.comm.clock = max(self.comm.clock, self.end)


class _Received(Handle):
    def __init__(self, comm, handles, source, out, times):
        super().__init__(out)
        self.comm, self.handles, self.source, self.times = comm, handles, source, times

    def wait(self):
        comm, out = self.comm, self._result
        if self.handles:
            for handle in self.handles:
                handle.wait()
            self.handles = []
            seconds = comm.alpha + comm.beta * out.nbytes
            comm.receiving = max(self.times[1], comm.receiving + seconds)
            comm.messages.append(Message(self.source, comm.rank, out.nbytes, comm.receiving - seconds, comm.receiving))
            comm.clock = max(comm.clock, comm.receiving)
        return out


def simulate(p, collective, alpha, beta):
    """(seconds, [Message]) of collective(comm) on p ranks; `seconds` is the time of the last rank."""

    def rank(group):
        comm = TimedCommunicator(group, alpha, beta)
        collective(comm)
        return comm.clock, comm.messages

    results = run_ranks(p, rank)
    messages = sorted((message for _, received in results for message in received), key=lambda each: each.begin)
    return max(clock for clock, _ in results), messages


def draw_messages(panels, alt):
    """Draw the messages of several algorithms on a common time axis; panels: {title: (p, seconds, [Message])}.

    A bar is a message on the line of its receiver; its number is the rank that sends it. alt: see show().
    """
    heights = [p + 1 for p, _, _ in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 0.36 * sum(heights)), height_ratios=heights, sharex=True, squeeze=False
    )
    longest = max(seconds for _, seconds, _ in panels.values())
    for panel, (title, (p, seconds, messages)) in zip(axes[:, 0], panels.items(), strict=True):
        for message in messages:
            bar = [(1e3 * message.begin, 1e3 * (message.end - message.begin))]
            panel.broken_barh(
                bar, (message.to - 0.35, 0.7), facecolors=f"C{message.source}", edgecolor="white", linewidth=0.6
            )
            if message.end - message.begin > 0.015 * longest:
                middle = 1e3 * (message.begin + message.end) / 2
                panel.text(middle, message.to, str(message.source), ha="center", va="center", color="white", fontsize=8)
        panel.set_title(f"{title}: {1e3 * seconds:.2f} ms, {len(messages)} messages", loc="left", fontsize=10)
        panel.set_yticks(range(p), [f"to rank {rank}" for rank in range(p)], fontsize=8)
        panel.set_ylim(p - 0.5, -0.5)
        panel.grid(axis="x", alpha=0.3)
    axes[-1, 0].set_xlabel("ms in the alpha-beta model; the number in a bar is the rank that sends")
    show(alt)
