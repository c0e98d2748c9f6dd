"""Run a command and exit. A user's mistake gives one line on standard error and exit code 2, never a traceback.

If `error.shared` is true, all ranks raise the error at the same place (see gpt2core/errors.py), and only the root
prints it. Otherwise only this rank has the error. It prints the error and aborts the job, because the other ranks would
wait for it forever.
"""

import contextlib
import os
import sys
import time
import traceback
import warnings

import numpy as np

from gpt2core.app.output.failed_output import discard_output
from gpt2core.app.settings.definitions import with_flags
from gpt2core.app.settings.flag_parser import HelpPrinted
from gpt2core.communicator import Solo
from gpt2core.errors import DeviceMemoryError, UserError

GRACE = 0.4  # seconds: rank r waits r * GRACE (at most 8 * GRACE) before it reports an error, see wait_for_lower_ranks


def run_command(make_world, body, memory_advice="free some memory, or use a smaller model"):
    """Call body(world), with `world` the result of make_world(), and exit with the exit code that body() returns.

    A user's mistake prints one line on standard error and gives exit code 2. An error of a single rank ends the whole
    job, and its cause is printed once. memory_advice: what the user can do if the memory is too small.
    """
    open_closed_streams()
    with contextlib.suppress(AttributeError):  # a replaced sys.stdout may have no reconfigure()
        # Print "?" for characters that the terminal's encoding lacks. Send each line at once: the standard output of a
        # rank is a pipe to mpiexec, and Python would otherwise keep 8 kB of lines before it writes them.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    world = Solo()  # until make_world() has returned
    try:
        # Overflow is reported once, by the check of the loss, not by NumPy's warnings.
        with short_warnings(), np.errstate(all="ignore"):
            world = make_world()
            code = body(world)
        sys.stdout.flush()
        world.barrier()  # the root may still print: a rank that waits for it in MPI's finalization uses a whole core
    except HelpPrinted:
        code = 0
    except UserError as error:
        code = fail(world, error, error.shared)
    except DeviceMemoryError as error:
        code = fail(world, error)
    except MemoryError as error:
        code = fail(world, f"out of memory ({error}): {memory_advice}")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # immediately: a normal exit would wait for the worker threads to finish their step
    except BrokenPipeError:  # the reader of standard output has exited
        code = world.abort(1)
    except OSError as error:
        text = f"{error.filename or 'the output'}: {error.strerror or error}"
        code = fail(world, text, getattr(error, "shared", False))
    except (Exception, SystemExit) as error:  # SystemExit too: the other ranks would wait for a rank that exits
        code = crash(world, error)
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()
    sys.exit(code)


def open_closed_streams():
    """Open /dev/null for each standard stream that is closed, for example after `<&-`, because Python sets it to None.

    The file also occupies the file descriptor, which the next opened file would get otherwise.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


@contextlib.contextmanager
def short_warnings():
    """In this context, a warning of this project is one line, "note: ...", without the line of code that gives it.

    Equal lines are printed only once.
    """
    original, printed = warnings.formatwarning, set()

    def format_warning(message, category, *place, **options):
        if category is not UserWarning:
            return original(message, category, *place, **options)
        line = "" if str(message) in printed else f"note: {with_flags(str(message))}\n"
        printed.add(str(message))
        return line

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = original


@contextlib.contextmanager
def warnings_after():
    """In this context, warnings are held back and printed at its end, so that they are not inside the printed text."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for each in caught:
        warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def error_text(error):
    """The text of an error as a command prints it: one line, with flags instead of the names of settings."""
    return with_flags(" ".join(str(error).splitlines()))


def fail(world, message, shared=False):
    """Print a user's mistake and return exit code 2; on many ranks, abort the job unless the error is `shared`."""
    text = error_text(message)
    if world.one_process or (shared and world.is_root):
        sys.stderr.write(f"error: {text}\n")  # one write: the lines of several processes must not mix
    elif not shared:
        wait_for_lower_ranks(world)
        sys.stderr.write(f"error: rank {world.rank}: {text}\n")
        world.abort(2)
    return 2


def crash(world, error):
    """Print the traceback of an unexpected error and abort the job; if there is only one process, raise the error."""
    if world.one_process:
        raise error
    wait_for_lower_ranks(world)
    print(f"rank {world.rank} of {world.size} failed:", file=sys.stderr)
    traceback.print_exception(error)
    world.abort(1)


def wait_for_lower_ranks(world):
    """Wait, because lower ranks may have the same error: the first of them prints it and ends the job."""
    time.sleep(min(world.rank, 8) * GRACE)
