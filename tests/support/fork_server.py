"""Run scripts as processes, each a fork of one Python process that has loaded the modules: 20 ms each instead of 300.

A fork has its own arguments, directory, output files and signal handlers, and ends as an interpreter ends: with its
exit handlers, and with a traceback if an error is not caught. Only the import of the modules is shared.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60  # seconds after which the kernel ends a process with SIGALRM: a process that hangs is a failure, not a wait
MODULES = (  # loaded before the first fork
    "gpt2core.app.cli", "gpt2core.app.training.command", "gpt2core.app.planning.dry_run", "stage0_serial.numpy_backend",
    "numpy.random", "tokenizers",
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A process that has ended: its exit code (minus the signal's number if a signal ended it) and its output."""

    code: int
    out: str
    err: str


class ForkServer:
    """A context manager. run(words) -> Done of one script."""

    def __enter__(self):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, __file__], cwd=ROOT, **pipes)
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(LIMIT)

    def run(self, words, cwd):
        """Run the script words[0], a path from the root or "-m" and a module, with the arguments words[1:] -> Done."""
        print(json.dumps([list(map(str, words)), str(cwd)]), file=self.process.stdin, flush=True)
        return Done(*json.loads(self.process.stdout.readline()))


def serve(answers):
    """Fork once for each request on standard input. Returns None at its end, and (words, cwd) in each fork."""
    for request in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                signal.alarm(LIMIT)
                nothing = os.open(os.devnull, os.O_RDONLY)
                for number, descriptor in enumerate((nothing, out.fileno(), err.fileno())):
                    os.dup2(descriptor, number)
                answers.close()
                return json.loads(request)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(json.dumps([code, *map(text_of, (out, err))]), file=answers, flush=True)


def text_of(file):
    file.seek(0)
    return file.read().decode("utf-8", errors="backslashreplace")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    for module in MODULES:
        __import__(module)
    gc.freeze()  # the collections of a fork, also the one at its end, skip the modules
    if fork := serve(os.fdopen(os.dup(1), "w")):
        sys.argv, cwd = fork
        os.chdir(cwd)
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = sys.path[0] = str(ROOT / sys.argv[0])
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
