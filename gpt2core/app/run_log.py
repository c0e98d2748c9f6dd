"""What a run says of itself: a progress bar, one line a step on the screen, one JSON object a step in the log."""

import contextlib
import dataclasses
import json
import math
import os
import sys
from pathlib import Path

from tqdm import tqdm

from gpt2core.errors import ConfigError


class RunLog:
    """Reports each step. `path` (JSON lines) and `plot` (PNG) may be None; steps before `first` are kept from a resume.

    Floats are written at full precision; validation adds val_loss and val_perplexity; the last line carries
    parameters_sha256 and, on a device, peak_memory_bytes. Raises ConfigError when a file cannot be written: before the
    first step or as a disk fills up.
    """

    def __init__(self, path, plot, every, first, steps):
        self.every, self.plot, self.rows, self.whole = every, plot, [], 0
        for file in filter(None, (path, plot)):
            try:
                open(file, "a").close()
            except OSError as error:
                raise ConfigError(f"{file}: cannot be written ({error.strerror}): choose another file") from None
        if path and first:
            self.rows = [row for row in read_log(path) if row["step"] < first]
        self.file = open(path, "w") if path else None
        for row in self.rows:
            self.write(row)
        self.bar = tqdm(total=steps, initial=first, unit="step", disable=None, leave=False, dynamic_ncols=True)

    def __call__(self, step, val_loss, last_words):
        """Report a Step; `last_words` are more fields for the last one's line, else None."""
        row = {key: value for key, value in dataclasses.asdict(step).items() if value is not None}
        if val_loss is not None:
            row |= {"val_loss": val_loss, "val_perplexity": perplexity(val_loss)}
        row |= last_words or {}
        self.bar.update()
        self.bar.set_postfix_str(f"loss {step.loss:.4f}")
        self.rows.append(row)
        if step.step % self.every == 0 or val_loss is not None or last_words:
            self.write(row)
            self.say(self.line(step, val_loss))

    def line(self, step, val_loss):
        parts = [
            f"step {step.step:5d}",
            f"loss {step.loss:.6f}",
            f"lr {step.lr:.3e}",
            f"norm {step.grad_norm:.4f}",
            f"{step.seconds * 1e3:8.1f} ms",
            f"{step.tokens_per_second:,.0f} tok/s",
        ]
        if step.loss_scale is not None:
            parts.append(f"scale {step.loss_scale:g}" + (f", skipped {step.skipped}" if step.skipped else ""))
        if step.bytes_sent is not None:
            parts.append(f"sent {step.bytes_sent / 1e6:.2f} MB")
        if step.mfu is not None:
            parts.append(f"mfu {step.mfu:.1%}")
        if val_loss is not None:
            parts.append(f"val loss {val_loss:.6f} perplexity {perplexity(val_loss):.3f}")
        return " | ".join(parts)

    def say(self, text):
        """Print without tearing the progress bar."""
        tqdm.write(text)

    def tell(self, text):
        """The same on standard error."""
        tqdm.write(text, file=sys.stderr)

    def write(self, row):
        if self.file:
            try:
                self.file.write(json.dumps(row) + "\n")
                self.file.flush()
                self.whole = self.file.tell()
            except OSError as error:
                file, self.file = self.file, None
                with contextlib.suppress(OSError):
                    file.close()
                with contextlib.suppress(OSError):
                    os.truncate(file.name, self.whole)  # half a line is of no use
                raise ConfigError(
                    f"{file.name}: cannot be written ({error.strerror}) at step {row['step']}: free some space"
                ) from None

    def close(self):
        self.bar.close()
        if self.file:
            with contextlib.suppress(OSError):  # every row was flushed, or its failure is what ends the run
                self.file.close()
        if self.plot and self.rows:
            try:
                plot_curve(self.rows, self.plot)
            except OSError as error:
                raise ConfigError(f"{self.plot}: cannot be written ({error.strerror}): free some space") from None


class SilentLog:
    """The log of a rank that is not the root."""

    def say(self, text):
        pass

    tell = say

    def __call__(self, step, val_loss, last_words):
        pass

    def close(self):
        pass


def perplexity(loss):
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def read_log(path):
    """The rows of a log; a last line that a crash cut short is left out. A missing log has none."""
    rows = []
    if Path(path).is_file():  # a device has no end
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int) and "loss" in row]


def plot_curve(rows, path):
    """Write the loss curve of `rows` as PNG."""
    import matplotlib  # here, because it takes longer to load than a step of `tiny` takes to run

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label="training")
    validated = [row for row in rows if "val_loss" in row]
    if validated:
        steps = [row["step"] for row in validated]
        axes.plot(steps, [row["val_loss"] for row in validated], "o-", label="validation")
        axes.legend()
    axes.set(xlabel="step", ylabel="cross-entropy (nats a token)", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)
