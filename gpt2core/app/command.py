"""Run a command and exit: a user's mistake is one line on standard error and exit code 2, never a traceback."""

import contextlib
import os
import sys
import time
import traceback

import numpy as np

from gpt2core.communicator import Solo
from gpt2core.errors import DeviceMemoryError, UserError

GRACE = 0.4  # seconds per lower rank (at most 8) that a failing rank waits, so that a lower rank reports first


class HelpPrinted(Exception):
    """Raised after --help or --version was printed: the command ends with exit code 0."""


def run_command(make_world, body):
    """Run body(world) and exit with the code that it returns.

    A user's mistake prints one line on standard error and gives exit code 2. An error of a single rank ends the whole
    job, and its cause is printed once.
    """
    with contextlib.suppress(AttributeError):  # print "?" for characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    world = Solo()
    try:
        with np.errstate(all="ignore"):  # overflow is reported once, by the check of the loss, not by NumPy's warnings
            world = make_world()
            code = body(world)
        sys.stdout.flush()
        world.barrier()  # wait here until the root has printed: MPI's finalization would spin
    except HelpPrinted:
        code = 0
    except UserError as error:
        code = fail(world, error, error.shared)
    except DeviceMemoryError as error:
        code = fail(world, error)
    except MemoryError as error:
        advice = "lower --batch-size, raise --micro-batches or use a smaller --preset"
        code = fail(world, f"out of memory ({error}): {advice}")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # immediately: a normal exit would wait for the worker threads to finish their step
    except BrokenPipeError:  # the reader of standard output has exited
        code = world.abort(1)
    except OSError as error:
        text = f"{error.filename or 'the output'}: {error.strerror or error}"
        code = fail(world, text, getattr(error, "shared", False))
    except (Exception, SystemExit) as error:  # if this rank only exited, the others would wait for it
        code = crash(world, error)
    try:
        sys.stdout.flush()
    except OSError:  # otherwise the interpreter would flush again at exit and print the error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def fail(world, message, shared=False):
    """Print a user's mistake; return exit code 2 if all ranks have the same error, otherwise abort the job."""
    text = " ".join(str(message).splitlines())
    if world.one_process or (shared and world.is_root):
        print("error:", text, file=sys.stderr)
    elif not shared:
        wait_for_lower_ranks(world)
        print(f"error: rank {world.rank}: {text}", file=sys.stderr)
        world.abort(2)
    return 2


def crash(world, error):
    """Print the traceback of an unexpected error and abort the job; in a world of one process, raise the error."""
    if world.one_process:
        raise error
    wait_for_lower_ranks(world)
    print(f"rank {world.rank} of {world.size} failed:", file=sys.stderr)
    traceback.print_exception(error)
    world.abort(1)


def wait_for_lower_ranks(world):
    """Give lower ranks time to print the same error and to end the job, so that it is printed only once."""
    time.sleep(min(world.rank, 8) * GRACE)
