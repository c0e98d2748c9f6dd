"""Save checkpoints in another process while training continues: BackgroundWriter, and the program of that process.

The trainer copies all arrays to memory that both processes share, sends a request through a pipe, and continues; the
writer saves the checkpoint as save_checkpoint() does, so the files are the same, and answers through another pipe. A
thread instead of a process would hold Python's GIL for a part of the time. The shared memory has no name and the writer
ends at the end of its input, so nothing remains if the trainer is killed, except an incomplete step with a hidden name.
"""

import itertools
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
    """

    def __init__(self, on_error):
        self.on_error, self.process, self.busy = on_error, None, False
        self.memory, self.descriptor = None, None  # an mmap, and the file descriptor of its memory

    def save(self, directory, step, *, parameters, moments, tokenizer, settings_text, command, **options):
        """Begin to save a checkpoint, after the one before is complete.

        settings_text, command: see after_save(). The other arguments are those of save_checkpoint(). When this method
        returns, the arrays may change.
        """
        self.poll(wait=True)
        arrays = [*parameters.values(), *(array for pair in moments.values() for array in pair)]
        try:
            layout = self.copy(arrays)
            self.start()
            places = [(array.shape, offset) for array, offset in zip(arrays, layout, strict=True)]
            request = directory, step, list(parameters), places, tokenizer.to_bytes(), options, settings_text, command
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
        except OSError as error:  # too little memory; or the writer was killed
            reason = error.strerror or error
            self.failed(f"{directory}: step {step} cannot be saved in another process ({reason})")
        else:
            self.busy = True

    def save_now(self, directory, step, *, settings_text, command, **options):
        """The same, but this process saves the checkpoint; raises CheckpointError if it cannot be saved."""
        self.poll(wait=True)
        save_checkpoint(directory, step, **options)
        after_save(directory, settings_text, command)

    def copy(self, arrays):
        """Copy arrays, float32, to the shared memory; return the offset of each, in bytes."""
        sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
        if self.memory is None:
            self.descriptor = shared_memory(sum(sizes))
            self.memory = mmap.mmap(self.descriptor, sum(sizes))
        *offsets, _ = itertools.accumulate(sizes, initial=0)
        for array, offset in zip(arrays, offsets, strict=True):
            np.copyto(view(self.memory, array.shape, offset), array, casting="no")
        return offsets

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
        """Call on_error if the checkpoint that is saved meanwhile has failed. wait: until it is complete or failed."""
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
        if self.memory is not None:
            self.memory.close()
            os.close(self.descriptor)
            self.memory = None


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
