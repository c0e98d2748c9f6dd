"""Text on a terminal: lines are broken between words. A pipe or a file gets the text unchanged."""

import re
import shutil
import sys

LINE = 79  # characters per line of the output of a training if the width is unknown


def terminal_width():
    """The number of characters to use in a line of standard output, or None if it is not a terminal.

    Open MPI gives each rank a terminal of unknown width, also if the output of mpiexec goes to a file: None too.
    """
    columns = shutil.get_terminal_size(fallback=(0, 0)).columns if sys.stdout.isatty() else 0
    return columns - 1 if columns else None


def wrapped(text, width=None):
    """`text` with lines of at most `width` characters; None: lines that fit the terminal."""
    return WordWrap(width or terminal_width()).push(text, last=True)


class WordWrap:
    """Breaks a text that arrives in pieces into lines of at most `width` characters.

    A line break replaces a space. A word longer than `width` is not broken. With width None the text is unchanged.
    """

    def __init__(self, width):
        self.width, self.column, self.held = width, 0, ""

    def push(self, piece, last=False):
        """The text that can be printed now: up to the last complete word, or all of it if this is the `last` piece."""
        if self.width is None:
            return piece
        *words, self.held = re.split(r"(?<=\S)(?=\s)", self.held + piece)  # each with the space before it
        if last:
            words.append(self.held)
        return "".join(map(self.place, words))

    def place(self, word):
        """`word`, on a new line if it does not fit; moves `column` to its end."""
        if word.startswith(" ") and "\n" not in word and self.column + len(word) > self.width:
            word = "\n" + word.lstrip(" ")
        _, broken, tail = word.rpartition("\n")
        self.column = len(tail) + (0 if broken else self.column)
        return word
