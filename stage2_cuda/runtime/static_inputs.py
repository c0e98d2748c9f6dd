"""What the host tells a recorded step: arrays in fixed places of the device, filled ahead and sent by one copy."""

import contextlib

import numpy as np

BLOCK = 1 << 20  # bytes of a buffer; an array that is larger has one of its own
ALIGNED = 256  # bytes: a place begins on a multiple, as any allocation does
HOST_TO_DEVICE = 1  # cudaMemcpyKind


def lasting(xp):
    """Inside, arrays are not cut out of CuPy's pool: one that stays keeps a block, however large, from being whole."""
    return contextlib.nullcontext() if xp is np else xp.cuda.using_allocator(None)


class Mailbox:
    """Named host arrays, each with its place on the device, where a recorded step finds it again and again.

    put() writes on the host, while the device may still be working; send() brings it all over, in the order of the
    current stream. Where xp is numpy both are the same memory.
    """

    def __init__(self, xp):
        self.xp, self.places, self.buffers = xp, {}, []
        self.copied = None if xp is np else xp.cuda.Event(disable_timing=True)

    def put(self, name, array):
        """Keep a C-contiguous host array of this name; returns its place, an array of the device, filled by send()."""
        if self.copied:
            self.copied.synchronize()  # the last copy has read what is overwritten now
        place, host = self.places.get(name, (None, None))
        if place is None or place.shape != array.shape or place.dtype != array.dtype:
            place, host = self.places[name] = self.find_place(array)
        host[...] = array
        return place

    def host(self, place):
        """(name, what was put last) of a place; (None, None) of an array that is none."""
        return next(((name, host) for name, (own, host) in self.places.items() if own is place), (None, None))

    def find_place(self, array):
        if not self.buffers or self.buffers[-1].free < array.nbytes:
            self.buffers.append(Buffer(self.xp, max(BLOCK, -(-array.nbytes // ALIGNED) * ALIGNED)))
        return self.buffers[-1].cut(array.shape, array.dtype)

    def send(self):
        """Copy all that was put to its places, on the current stream."""
        if self.copied:
            stream = self.xp.cuda.get_current_stream()
            for buffer in self.buffers:
                self.xp.cuda.runtime.memcpyAsync(*buffer.addresses, buffer.used, HOST_TO_DEVICE, stream.ptr)
            self.copied.record(stream)


class Buffer:
    """Bytes of the host, which the device can fetch by itself, and as many of the device."""

    def __init__(self, xp, size):
        if xp is np:
            self.host = self.device = np.empty(size, np.uint8)
        else:
            import cupyx

            self.host = cupyx.empty_pinned(size, np.uint8)
            with lasting(xp):
                self.device = xp.empty(size, np.uint8)
            self.addresses = self.device.data.ptr, self.host.ctypes.data
        self.used = 0

    @property
    def free(self):
        return self.host.size - self.used

    def cut(self, shape, dtype):
        """(device, host) views of the next bytes."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        begin, end = self.used, self.used + size
        self.used += -(-size // ALIGNED) * ALIGNED
        return tuple(memory[begin:end].view(dtype).reshape(shape) for memory in (self.device, self.host))
