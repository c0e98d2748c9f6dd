"""Save checkpoints in another process while training continues: BackgroundWriter, and the program of that process.

The trainer copies all arrays to memory that both processes share, sends a request through a pipe, and continues; the
writer saves the checkpoint as save_checkpoint() does, so the files are the same, and answers through another pipe. A
thread instead of a process would hold Python's GIL for a part of the time. A GPU copies while the next steps run; the
request is sent when the copies are complete. The shared memory has no name and the writer ends at the end of its input,
so nothing remains if the trainer is killed, except an incomplete step with a hidden name.
"""

import contextlib
import itertools
import math
import mmap
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from gpt2core.app.checkpoints.directory import save_checkpoint
from gpt2core.app.output.failed_output import noted
from gpt2core.app.settings.config_file import NAME, write_settings
from gpt2core.errors import UserError
from gpt2core.parallel.launcher_env import environment_of_no_rank, tell_launcher

ROOT = Path(__file__).resolve().parents[2]
ALIGNMENT = 64  # bytes; each array begins at a multiple of it


class BackgroundWriter(AbstractContextManager):
    """Saves the checkpoints of a run, one at a time. Its context waits for the last one, and ends the process.

    on_error(text) is called, once for each checkpoint that could not be saved, by the next method that is called.
    runtime: the Runtime of the arrays.
    """

    def __init__(self, on_error, runtime):
        self.on_error, self.runtime = on_error, runtime
        self.process, self.busy = None, False  # busy: whether the process saves a checkpoint
        self.memory, self.descriptor = None, None  # an mmap, and the file descriptor of its memory
        self.pinned = contextlib.ExitStack()
        self.copying, self.request = None, None  # a HostCopy, and the request that is sent when it is complete

    def prepare(self, shapes):
        """Start the process, and allocate memory for float32 arrays of these shapes, unless it was done before.

        The first save() does it too, but then training waits. Raises OSError if there is too little memory.
        """
        if self.memory is None:
            size = sum(sizes_of(shapes))
            self.descriptor = shared_memory(size)
            self.memory = mmap.mmap(self.descriptor, size)
            self.pinned.enter_context(self.runtime.pin(np.frombuffer(self.memory, np.uint8)))
        self.start()

    def save(self, directory, step, *, parameters, moments, tokenizer, settings_text, command, **options):
        """Begin to save a checkpoint, after the one before is complete.

        parameters, moments: arrays of the device. settings_text, command: see after_save(). The other arguments are
        those of save_checkpoint(). When this method returns, the arrays may change.
        """
        self.poll(wait=True)
        arrays = [*parameters.values(), *(array for pair in moments.values() for array in pair)]
        shapes = [array.shape for array in arrays]
        places = list(zip(shapes, itertools.accumulate(sizes_of(shapes), initial=0), strict=False))
        self.request = directory, step, list(parameters), places, tokenizer.to_bytes(), options, settings_text, command
        try:
            self.prepare(shapes)
            outs = [view(self.memory, *place) for place in places]
            self.copying = self.runtime.copy_to_host(list(zip(arrays, outs, strict=True)))
        except OSError as error:
            self.not_saved(error)
        else:
            self.poll()

    def save_now(self, directory, step, *, settings_text, command, **options):
        """The same, but this process saves the checkpoint; raises CheckpointError if it cannot be saved."""
        self.poll(wait=True)
        save_checkpoint(directory, step, **options)
        after_save(directory, settings_text, command)

    def send(self):
        """Send the request whose arrays are in the shared memory."""
        try:
            self.start()
            pickle.dump(self.request, self.process.stdin)
            self.process.stdin.flush()
        except OSError as error:  # the writer was killed
            self.not_saved(error)
        else:
            self.busy = True

    def not_saved(self, error):
        directory, step, *_ = self.request
        self.failed(f"{directory}: step {step} cannot be saved in another process ({error.strerror or error})")

    def start(self):
        """Start the process, unless it runs. Its signals are those of a session of its own: Ctrl-C does not end it."""
        if self.process and self.process.poll() is not None:  # it was killed
            self.end()
        if self.process is None:
            program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {__name__} import main; main(sys.argv[1])"
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, str(self.descriptor)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_of_no_rank(), pass_fds=[self.descriptor],
                start_new_session=True,
            )  # fmt: skip

    def poll(self, wait=False):
        """Continue to save: send the request whose copies are complete, and read the answer of the process.

        Calls on_error if the checkpoint has failed. wait: until it is complete or failed.
        """
        if self.copying and (wait or self.copying.is_complete()):
            self.copying.wait()
            self.copying = None
            self.send()
        if self.busy and (wait or select.select([self.process.stdout], [], [], 0)[0]):
            self.busy = False
            try:
                problem = pickle.load(self.process.stdout)
            except EOFError:
                code = self.process.wait()
                problem = f"a checkpoint was not saved: the process that saves it ended with exit code {code}"
            if problem:
                self.failed(problem)

    def failed(self, problem):
        self.on_error(f"note: {problem}; training continues")

    def end(self):
        """End the process, which does not complete the checkpoint that it saves."""
        if process := self.process:
            self.process = None
            process.kill()
            process.communicate()

    def __exit__(self, kind, *error):
        if not (kind and issubclass(kind, KeyboardInterrupt)):  # a second Ctrl-C does not wait
            self.poll(wait=True)
        self.end()
        if self.copying:
            self.copying.wait()  # otherwise a device writes to memory that is freed here
        self.pinned.close()
        if self.memory is not None:
            self.memory.close()
            os.close(self.descriptor)
            self.memory = None


def sizes_of(shapes):
    """The bytes in the shared memory of float32 arrays of these shapes."""
    return [-(-4 * math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes]


def shared_memory(size):
    """The descriptor of `size` bytes of memory without a name: it is freed when no process has it open."""
    if hasattr(os, "memfd_create"):  # /dev/shm would be small in a container
        descriptor = os.memfd_create("checkpoint")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def view(memory, shape, offset):
    """The float32 array of this shape at `offset` bytes of an mmap."""
    return np.ndarray(shape, np.float32, memory, offset)


def after_save(directory, settings_text, command):
    """Write what a run writes after a checkpoint: its settings, and the command that continues it, for the launcher."""
    with noted(f"{NAME} was not written"):
        write_settings(directory / NAME, settings_text)
    with noted("the launcher would start a failed job from its beginning"):
        tell_launcher(command=command)


# -- the process -------------------------------------------------------------------------------------------------------


class SavedTokenizer:
    """The content of tokenizer.json, with the method of a Tokenizer that save_checkpoint() calls."""

    def __init__(self, content):
        self.content = content

    def save(self, path):
        Path(path).write_bytes(self.content)


def save_request(memory, directory, step, names, places, tokenizer_json, options, settings_text, command):
    """Save the checkpoint of a request of BackgroundWriter.save(); returns an error message, or None."""
    views = iter([view(memory, *place) for place in places])
    parameters = {name: next(views) for name in names}
    moments = {name: (next(views), next(views)) for name in names}
    tokenizer = SavedTokenizer(tokenizer_json)
    try:
        save_checkpoint(directory, step, parameters=parameters, moments=moments, tokenizer=tokenizer, **options)
    except Exception as error:  # of any type: the trainer waits for an answer
        return str(error) if isinstance(error, UserError) else f"{directory}: step {step} was not saved: {error!r}"
    after_save(directory, settings_text, command)
    return None


def main(descriptor):
    """Save each requested checkpoint in a thread, so that the end of the input ends this process at once."""
    memory = mmap.mmap(int(descriptor), 0)

    def answer(request):
        pickle.dump(save_request(memory, *request), sys.stdout.buffer)
        sys.stdout.buffer.flush()

    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)
        threading.Thread(target=answer, args=(request,), daemon=True).start()
