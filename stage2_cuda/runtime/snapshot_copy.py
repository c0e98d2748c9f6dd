"""Copies of device arrays to the host while the next training steps run."""

from gpt2core.runtime import HostCopy


class SnapshotCopy(HostCopy):
    """A HostCopy that first copies the arrays on the device, which takes milliseconds, and then those to the host.

    The second copies run on a stream of their own, beside later work, if the host arrays are pinned. If the device has
    too little memory for the first ones, the arrays themselves are copied to the host, and the host waits.
    """

    def __init__(self, cupy, pairs):
        arrays, outs = zip(*pairs, strict=True)
        main, stream = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
        try:
            self.snapshot = [array.copy() for array in arrays]  # kept until they are read
        except cupy.cuda.memory.OutOfMemoryError:
            self.snapshot = None
        stream.wait_event(main.record(cupy.cuda.Event(disable_timing=True)))
        for array, out in zip(self.snapshot or arrays, outs, strict=True):
            array.get(stream=stream, out=out, blocking=False)
        self.done = stream.record(cupy.cuda.Event(disable_timing=True))
        if self.snapshot is None:
            self.wait()

    def is_complete(self):
        return self.done.done

    def wait(self):
        self.done.synchronize()
        self.snapshot = None
