"""Whether operations are recorded for backward(). Kernels read it, so that they need not import autograd."""

import contextlib
import contextvars

_recording = contextvars.ContextVar("recording", default=True)  # a context variable: each thread has its own value


class AutogradError(RuntimeError):
    """The gradients cannot be computed, for example because the graph was freed or never recorded."""


@contextlib.contextmanager
def no_grad():
    """Disable recording: `with no_grad(): ...`, or `@no_grad()` on a function."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording():
    """Whether operations are recorded in this thread. If not, kernels need not save data for backward."""
    return _recording.get()
