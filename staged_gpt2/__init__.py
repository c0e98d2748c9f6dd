"""GPT-2 in a few lines of Python: load weights and generate, or train on a text.

    import staged_gpt2 as sg

    model = sg.GPT2.from_pretrained("data/gpt2-book")
    print(model.generate("Call me", 40, top_k=10, seed=1))
    run = sg.train("my.txt", preset="tiny", steps=100, on_step=print)
    run.model.save_pretrained("out/mine")

This package is above the stages, as their scripts are: it chooses a Backend and a Communicator, and calls the functions
of the commands. It prints nothing, and raises the errors that the commands print as one line. docs/PYTHON.md has more.
"""

import importlib
from typing import TYPE_CHECKING

from gpt2core.architecture import GPT2Config
from gpt2core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceMemoryError,
    Diverged,
    ShapeError,
    UserError,
)
from gpt2core.recording import AutogradError, no_grad
from staged_gpt2 import import_app  # noqa: F401  before the modules that import gpt2core.app
from staged_gpt2.gpt2 import GPT2

if TYPE_CHECKING:
    from gpt2core import ops
    from gpt2core.plain_backend import PlainBackend
    from gpt2core.tensor import Tensor
    from staged_gpt2.loss_plot import LossPlot
    from staged_gpt2.training import Run, evaluate, train

# {name: its module}: imported when it is used, because a program that only generates text needs none of them
LATER = {
    "LossPlot": "staged_gpt2.loss_plot",
    "PlainBackend": "gpt2core.plain_backend",
    "Run": "staged_gpt2.training",
    "Tensor": "gpt2core.tensor",
    "evaluate": "staged_gpt2.training",
    "train": "staged_gpt2.training",
}

__all__ = [
    "GPT2", "GPT2Config", "LossPlot", "Run", "evaluate", "train",
    "PlainBackend", "Tensor", "no_grad", "ops",
    "AutogradError", "CheckpointError", "ConfigError", "DataError", "DeviceMemoryError", "Diverged", "ShapeError",
    "UserError",
]  # fmt: skip


def __getattr__(name):
    if name == "ops":
        return importlib.import_module("gpt2core.ops")
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
