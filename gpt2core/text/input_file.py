"""Read a file that a user names. No read waits forever, and none fills the memory: the file has a kind and a limit.

Opening a named pipe waits until another program writes to it, and reading a device such as /dev/zero never ends. So
only regular files are read and, where a function says so, pipes, for example those of a shell's <(command).
"""

import errno
import os
import select
import stat
import sys

CHUNK = 1 << 17  # bytes per read
WAIT = 5  # seconds to wait until a program opens a pipe to write to it, or until a note says what is waited for
KINDS = [(stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device")]


def open_file(path, pipes=False, buffering=-1):
    """The regular file at `path`, opened for reading bytes; with `pipes`, also a pipe, whose reads do not wait.

    Raises OSError, also for any other kind of file.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        kind = next((name for is_kind, name in KINDS if is_kind(mode)), "a device")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", str(path))
    # Without O_NONBLOCK, open() of a pipe waits for its writer.
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering)


def blocks(path, size=CHUNK, pipes=False):
    """Yield the bytes of a file, up to `size` at once. pipes: as in open_file(). Raises OSError."""
    with open_file(path, pipes, buffering=0) as file:
        read = pipe_reader(file, path) if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) else file.read
        while block := read(size):
            yield block


def pipe_reader(file, path):
    """A function read(size) for the open pipe `file`: it waits for bytes while a program has the pipe open.

    read() raises OSError if no program opens the pipe within WAIT seconds.
    """
    poll, connected, noted = select.poll(), False, False
    poll.register(file, select.POLLIN)

    def read(size):
        nonlocal connected, noted
        while True:
            block = file.read(size)  # None: a writer has written nothing yet; b"": there is no writer
            if block or (block == b"" and connected):
                connected = True
                return block
            connected = connected or block is None or bool(poll.poll(WAIT * 1000))
            if not connected:
                raise OSError(errno.EAGAIN, "no program writes to this pipe", str(path))
            if block is None and not poll.poll(WAIT * 1000) and not noted:
                print(f"note: waiting for the program that writes to {path}", file=sys.stderr, flush=True)
                noted = True

    return read


def read_file(path, limit, pipes=False):
    """All bytes of a file; raises OSError, also if there are more than `limit`. pipes: as in open_file()."""
    parts, total = [], 0
    for block in blocks(path, pipes=pipes):
        parts.append(block)
        total += len(block)
        if total > limit:
            raise OSError(errno.EFBIG, f"has more than {limit:,} bytes", str(path))
    return b"".join(parts)
