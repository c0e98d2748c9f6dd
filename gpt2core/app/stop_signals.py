"""SIGINT, SIGTERM and SIGHUP stop a run after the current step; a second signal stops it at once."""

import contextlib
import os
import signal
import sys

ERASE_LINE = b"\r\x1b[K"  # of a terminal: remove the progress bar


class StopSignals(contextlib.AbstractContextManager):
    """In this context, the first SIGINT, SIGTERM or SIGHUP sets `received`; a second one has its usual effect."""

    def __enter__(self):
        self.received, self.previous = None, {}
        with contextlib.suppress(ValueError):  # only the main thread can set handlers; ranks that are threads set none
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self.previous[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number, frame):
        self.received = number
        signal.signal(number, self.previous[number])
        if sys.stderr.isatty():  # os.write, because the signal may have interrupted a print()
            text = b"stopping after the current step; a second signal stops at once\n"
            os.write(sys.stderr.fileno(), ERASE_LINE + text)

    def __exit__(self, *error):
        for number, handler in self.previous.items():
            signal.signal(number, handler)
