"""Find functions in Python source by their qualified names, remove their bodies, and replace them."""

import ast
import hashlib
import re
import tokenize

from gpt2core.text.input_file import open_file

MAX_BYTES = 1 << 20  # of a source file: a larger one is not read
COOKIE = re.compile(r"^[ \t\f]*#.*coding[:=].*")  # in line 1 or 2: it names the encoding of the file (PEP 263)


class SourceError(Exception):
    """A file of the student that cannot be graded. The message is one line."""


def read_source(path, name):
    """The text of a file, read as Python reads it: UTF-8, with or without a byte order mark, or the encoding it names.

    The comment that names an encoding is replaced by `#`, because the text may be written in UTF-8. Raises SourceError,
    with the `name` of the file, if it has more than MAX_BYTES or cannot be read.
    """
    try:
        open_file(path).close()
    except FileNotFoundError:
        raise SourceError(f"{name} is missing") from None
    except OSError as error:  # for example a named pipe, whose read would not end
        raise SourceError(f"{name} cannot be read: {error.strerror}") from None
    if path.stat().st_size > MAX_BYTES:
        raise SourceError(f"{name} has more than {MAX_BYTES >> 20} MB, so it is not read")
    try:
        with tokenize.open(path) as file:
            first, second, rest = (file.readline(), file.readline(), file.read())
        text = COOKIE.sub("#", first) + COOKIE.sub("#", second) + rest
        text.encode("utf-8")  # some encodings have escapes for half a character
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror}") from None
    except (SyntaxError, LookupError, UnicodeError):
        raise SourceError(
            f"{name} is not a text file in UTF-8, or in the encoding that a comment in its first two lines names"
        ) from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise SourceError(f"{name}, line {line}: Python cannot read this file: it contains a NUL byte")
    return text


def parse(text, name):
    """The syntax tree of `text`; raises SourceError with the line of the mistake."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise SourceError(f"{name}, line {error.lineno}: Python cannot read this file: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise SourceError(f"{name}: Python cannot read this file: {error}") from None


def find(tree, name):
    """The node of the function with this qualified name ("Class.method"), or None. The last definition counts."""
    node = tree
    for part in name.split("."):
        kinds = ast.FunctionDef | ast.ClassDef
        node = next((child for child in reversed(node.body) if isinstance(child, kinds) and child.name == part), None)
        if node is None:
            return None
    return node if isinstance(node, ast.FunctionDef) else None


def lines_in(text):
    """The lines of `text`, each with its newline, as Python counts them; str.splitlines() also splits at form feeds."""
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")]


def lines_of(node):
    """(first, last) line number of a function, with its decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno


def stripped(text, messages):
    """`text` without the bodies of functions. messages: {qualified name: text of the NotImplementedError}.

    The signature and the docstring of a function remain. Raises KeyError for a name that `text` does not contain.
    """
    lines, tree = lines_in(text), ast.parse(text)
    nodes = {name: find(tree, name) for name in messages}
    for name, node in sorted(nodes.items(), key=lambda item: -(item[1].lineno if item[1] else 0)):
        if node is None:
            raise KeyError(name)
        has_docstring = ast.get_docstring(node, clean=False) is not None
        if has_docstring:
            first, indent = node.body[0].end_lineno, node.body[0].col_offset
        else:
            first, indent = node.body[0].lineno - 1, node.body[0].col_offset
            while lines[first - 1].lstrip().startswith("#") and first > node.lineno:  # a comment may show the solution
                first -= 1
        lines[first : node.end_lineno] = [f'{" " * indent}raise NotImplementedError("{messages[name]}")\n']
    return "".join(lines)


def merged(text, name, keep, replace, real_text):
    """`text` of a student with some functions from `real_text`: (lines, the number of each line in `text`).

    keep: the qualified names that the student writes, which must exist. replace: those that are taken from
    `real_text`. The number of a line that is not the student's is 0. Raises SourceError.
    """
    tree, real_tree = parse(text, name), ast.parse(real_text)
    numbered = [(line, number) for number, line in enumerate(lines_in(text), 1)]
    real_lines = lines_in(real_text)
    nodes = {each: find(tree, each) for each in (*keep, *replace)}
    for each, node in nodes.items():
        if node is None:
            raise SourceError(f"{name} has no function {each}: add it again, with the name and arguments that it had")
    for each in sorted(replace, key=lambda each: -nodes[each].lineno):
        first, last = lines_of(nodes[each])
        real_first, real_last = lines_of(find(real_tree, each))
        numbered[first - 1 : last] = [(line, 0) for line in real_lines[real_first - 1 : real_last]]
    return [line for line, _ in numbered], [number for _, number in numbered]


def hash_of(folder, files):
    """{file: SHA-256 of its bytes, or None if it cannot be read}."""
    return {file: digest(folder / file) for file in files}


def digest(path):
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError:
        return None
