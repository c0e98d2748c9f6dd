"""Break the lines of text between words, so that they fit a terminal. Text for a pipe or a file is not changed."""

import re
import shutil
import sys

LINE = 79  # characters per line of a training's header and sample if the width of the terminal is unknown


def terminal_width():
    """The number of characters to use in a line of standard output, or None if standard output is not a terminal.

    The result is also None if the width of the terminal is unknown. Open MPI gives each rank such a terminal, even if
    the output of mpiexec goes to a file.
    """
    columns = shutil.get_terminal_size(fallback=(0, 0)).columns if sys.stdout.isatty() else 0
    return columns - 1 if columns else None


def wrapped(text, width=None):
    """`text` with lines of at most `width` characters; width None: as many as terminal_width() says."""
    return WordWrap(width or terminal_width()).push(text, last=True)


class WordWrap:
    """Breaks a text into lines of at most `width` characters; the text is given in pieces, for example tokens.

    A line break replaces a space. A word longer than `width` is not broken. If width is None, the text is not changed.
    """

    def __init__(self, width):
        self.width = width
        self.column = 0  # characters in the current line
        self.incomplete = ""  # the last word so far: the next piece may continue it

    def push(self, piece, last=False):
        """Add a piece; returns the text that can be printed now: all complete words, or all words after the `last`."""
        if self.width is None:
            return piece
        # each word begins with the spaces before it
        *words, self.incomplete = re.split(r"(?<=\S)(?=\s)", self.incomplete + piece)
        if last:
            words.append(self.incomplete)
        return "".join(map(self.place, words))

    def place(self, word):
        """`word`, with a line break in place of its spaces if it does not fit into the line; updates `column`."""
        if word.startswith(" ") and "\n" not in word and self.column + len(word) > self.width:
            word = "\n" + word.lstrip(" ")
        _, line_break, end = word.rpartition("\n")
        self.column = len(end) + (0 if line_break else self.column)
        return word
