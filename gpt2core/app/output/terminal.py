"""Break the lines of a text between words, so that they fit a terminal.

Text for a pipe or a file is not changed, unless the caller gives a width.
"""

import re
import shutil
import sys

DEFAULT_WIDTH = 79  # training_width() if standard output is not a terminal, for example on the ranks of mpirun


def terminal_width():
    """The number of characters to use in a line of standard output, or None if standard output is not a terminal.

    This is one less than the terminal has, because some terminals begin a new line after a character in the last
    column. The result is also None if the terminal does not report its width. Open MPI gives each rank such a terminal,
    even if the output of mpiexec goes to a file.
    """
    columns = shutil.get_terminal_size(fallback=(0, 0)).columns if sys.stdout.isatty() else 0
    return columns - 1 if columns else None


def training_width():
    """The number of characters in a line of the header, the notes and the sample of a training run."""
    return terminal_width() or DEFAULT_WIDTH


def wrapped(text, width=None):
    """`text` with lines of at most `width` characters. If width is None, it is the result of terminal_width()."""
    return WordWrap(width or terminal_width()).push(text, is_last=True)


class WordWrap:
    """Breaks a text into lines of at most `width` characters; the text is given in pieces, for example tokens.

    A line break replaces a space. A word longer than `width` is not broken. If width is None, the text is not changed.
    """

    def __init__(self, width):
        self.width = width
        self.column = 0  # characters in the current line
        self.incomplete = ""  # the last word so far, not yet returned, because the next piece may continue it

    def push(self, piece, is_last=False):
        """Add a piece; return the text that can now be printed: all new complete words.

        is_last: whether no piece follows. The last word is then complete too.
        """
        if self.width is None:
            return piece
        # each of `words` includes the spaces before the word
        *words, self.incomplete = re.split(r"(?<=\S)(?=\s)", self.incomplete + piece)
        if is_last:
            words.append(self.incomplete)
        return "".join(map(self.break_before, words))

    def break_before(self, word):
        """Return `word`, with a line break instead of the spaces before it if it does not fit into the current line."""
        if word.startswith(" ") and "\n" not in word and self.column + len(word) > self.width:
            word = "\n" + word.lstrip(" ")
        _, line_break, end = word.rpartition("\n")
        self.column = len(end) + (0 if line_break else self.column)
        return word
