"""SIGINT (Ctrl-C), SIGTERM or SIGHUP stops a run after the current step; the same signal again stops it at once."""

import contextlib
import os
import signal
import sys

ERASE_LINE = b"\r\x1b[K"  # bytes that make a terminal erase its current line, which has the progress bar
STOPPING = b"stopping after the current step; a second signal stops at once\n"


class StopSignals(contextlib.AbstractContextManager):
    """In this context, the first of the signals `numbers` only sets `received` to its number.

    A second signal of the same number has its usual effect, for example KeyboardInterrupt. prints: whether the first
    signal prints STOPPING on standard error; of many ranks, only the root should print it.

    ended_by: set it to the number of the signal that has ended the run, also if only another rank has received it. The
    same signal may reach this rank after the context; it then has no other effect than inside.
    """

    ended_by = None

    def __init__(self, prints=True, numbers=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        self.prints, self.numbers = prints, numbers
        self.received, self.previous = None, {}

    def __enter__(self):
        with contextlib.suppress(ValueError):  # only the main thread can set handlers; in tests, a rank is a thread
            for number in self.numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP is ignored and remains so
                    self.previous[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number, frame):
        """The signal handler: store the number of the signal and restore the previous handler."""
        self.received = number
        signal.signal(number, self.previous[number])
        if self.prints:
            text = ERASE_LINE * sys.stderr.isatty() + STOPPING
            with contextlib.suppress(OSError, ValueError):  # standard error is closed, or has no file descriptor
                os.write(sys.stderr.fileno(), text)  # not print(), which the signal may have interrupted

    def __exit__(self, *error):
        self.restore(self.ended_by)

    def restore(self, kept=None):
        """Set the handlers of before the context again, except that of the signal number `kept`."""
        for number, handler in self.previous.items():
            if number != kept:
                signal.signal(number, handler)
