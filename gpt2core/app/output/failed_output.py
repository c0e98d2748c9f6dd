"""Errors of output: those that end a command, and those after a finished run, which are only noted."""

import contextlib
import os
import sys


@contextlib.contextmanager
def noted(what):
    """In this context, an error ends only the context: one line on standard error says `what`, and the reason.

    After an error of standard output, later output is discarded. A closed pipe gives no line.
    """
    try:
        yield
    except Exception as error:  # of any type: a damaged font, too little memory for the sample, a full disk
        with contextlib.suppress(OSError):
            if not isinstance(error, BrokenPipeError):
                print(f"note: {what}: {reason(error)}", file=sys.stderr, flush=True)
        try:
            sys.stdout.flush()
        except OSError:
            discard_output()


def reason(error):
    """The message of an error on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def output_error(error):
    """Report an OSError that ended a command, and discard later output; returns the exit code.

    It is one line and 2, or no line and 1 if the program that reads standard output has exited.
    """
    discard_output()  # the exit would flush it again and fail
    if isinstance(error, BrokenPipeError):
        return 1
    print(f"error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
    return 2


def discard_output():
    """Redirect standard output to /dev/null: otherwise each flush, also that at exit, would raise its error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
