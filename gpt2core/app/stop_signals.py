"""SIGINT, SIGTERM and SIGHUP end a run after the current step; a second signal ends it at once."""

import contextlib
import os
import signal
import sys


class StopSignals(contextlib.AbstractContextManager):
    """SIGINT, SIGTERM and SIGHUP set `received` so that the step in hand is finished; a second one acts at once."""

    def __enter__(self):
        self.received, self.previous = None, {}
        with contextlib.suppress(ValueError):  # signals belong to the main thread: ranks that are threads run without
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self.previous[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number, frame):
        self.received = number
        signal.signal(number, self.previous[number])
        if sys.stderr.isatty():  # not print(), which may be what was interrupted
            os.write(sys.stderr.fileno(), b"\nending with the step in hand; once more ends at once\n")

    def __exit__(self, *error):
        for number, handler in self.previous.items():
            signal.signal(number, handler)
