"""LossPlot: the loss curve in a notebook, which grows while a model is trained."""

import dataclasses
import io
import time

from gpt2core.app.output.loss_plot import run_curves, write_plot
from gpt2core.errors import ConfigError
from gpt2core.trainer import Step


class LossPlot:
    """An argument on_step of train() that draws the loss of each step in the output of a notebook's cell.

    title: of the plot. every: the least number of seconds between two drawings; after the last step train() draws once
    more. Raises ConfigError outside of a notebook.
    """

    def __init__(self, title: str = "", every: float = 1.0):
        try:
            from IPython import get_ipython
            from IPython.display import Image, display
        except ImportError:
            get_ipython = lambda: None  # noqa: E731
        if not hasattr(get_ipython(), "kernel"):  # IPython in a terminal shows no pictures
            raise ConfigError("LossPlot draws in a notebook: in a program, use the setting `plot`, a PNG file")
        if not isinstance(title, str):
            raise ConfigError(f"`title={title!r:.60}` must be a text")
        if not isinstance(every, int | float) or isinstance(every, bool) or not every >= 0:
            raise ConfigError(f"`every={every!r:.60}` must be a number of seconds, 0 or more")
        self.image, self.display, self.title, self.every = Image, display, title, every
        self.rows, self.handle, self.next_time = [], None, 0.0

    def __call__(self, step: Step) -> None:
        self.rows.append(dataclasses.asdict(step))
        if time.monotonic() >= self.next_time:
            self.draw()

    def draw(self) -> None:
        """Replace the picture by one with all steps so far."""
        if not self.rows:
            return
        start, file = time.monotonic(), io.BytesIO()
        write_plot(run_curves(self.rows), self.title, file)
        image = self.image(file.getvalue(), format="png", width=700)
        if self.handle is None:
            self.handle = self.display(image, display_id=True)
        else:
            self.handle.update(image)
        end = time.monotonic()
        self.next_time = end + max(self.every, 9 * (end - start))  # at most a tenth of the time is for drawing
