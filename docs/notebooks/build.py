"""Write the notebook of each stage, stageN_*/walkthrough.ipynb, from the stage's lesson and the page stageN.md here.

    python docs/notebooks/build.py            # write the four notebooks, with the outputs of a run on this machine
    python docs/notebooks/build.py --check    # write nothing; exit with 1 if a notebook is not up to date

The page gives the order of the cells. Its text becomes Markdown cells, its ```python blocks become code cells, and
these lines are replaced:

    <!-- setup -->               the code cell that finds the repository and installs missing packages
    <!-- lesson: 1 2 -->         sections 1 and 2 of the stage's README.md, text and code
    <!-- code: PATH NAME ... --> a code cell with the source of these functions of a file of the repository

A block after a line "From [...](...):" quotes code and stays text. A block that begins with "# first.py" is a file of
the lesson: it becomes a code cell, and the import of this file is removed from later cells. Links are relative to the
folder of the stage. run.py executes the notebooks; it needs the packages of `make test`, as does this program.

The library jupytext is not used: it makes a code cell of each ```python block, also of one that quotes code.
"""

import ast
import re
import sys
import tokenize
from pathlib import Path

try:
    import nbformat
    from nbformat import v4
except ImportError:
    print("nbformat is missing: run make test-fast, then source .venv/bin/activate", file=sys.stderr)
    sys.exit(2)

PAGES = Path(__file__).resolve().parent
ROOT = PAGES.parents[1]
sys.path.append(str(ROOT))  # so that it also runs without installation

from gpt2core.app.command import run_command  # noqa: E402
from gpt2core.app.settings.flag_parser import Parser  # noqa: E402
from gpt2core.communicator import Solo  # noqa: E402

STAGES = (0, 1, 2, 3)
DIRECTIVE = re.compile(r"^<!-- (setup|lesson|code)(?:: (.*))? -->$")
CAPTION = re.compile(r"^From \[.*:$")
SETUP = """\
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    raise SystemExit("Python 3.11 or newer is needed: choose another kernel.")
here = Path.cwd()
folders = (here, *here.parents, *here.glob("*/"))  # the repository is above this folder, or a folder in it
root = next((folder for folder in folders if (folder / "docs" / "notebooks").is_dir()), None)
if root is None:
    raise SystemExit("The repository was not found: clone it into this folder, or open the notebook in the clone.")
sys.path[:0] = [str(root), str(root / "docs" / "notebooks")]
from walkthrough.setup import prepare, show

gpu = prepare(stage={stage})  # installs missing packages; True if there is a GPU"""


def stage_folder(stage):
    """The folder of a stage, for example stage0_serial."""
    return next(ROOT.glob(f"stage{stage}_*"))


def notebook_path(stage):
    return stage_folder(stage) / "walkthrough.ipynb"


def build(stage):
    """The notebook of a stage, without outputs. Raises ValueError for a line of its page that cannot be replaced."""
    cells = [
        v4.new_markdown_cell(source, id=f"text-{number}")
        if kind == "text"
        else v4.new_code_cell(source, id=f"code-{number}")
        for number, (kind, source) in enumerate(cells_of_page(stage), start=1)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return v4.new_notebook(cells=cells, metadata=metadata, nbformat_minor=5)


def cells_of_page(stage):
    """[("text" or "code", source)] of the page of a stage, with all lines of DIRECTIVE replaced."""
    cells, text, modules = [], [], set()
    lesson = (stage_folder(stage) / "README.md").read_text(encoding="utf-8")

    def add(page):
        text.clear()
        for kind, source in blocks(page):
            if kind == "code":
                cells.append(("code", as_cell(source, modules)))
            else:
                cells.append((kind, source))

    for line in (PAGES / f"stage{stage}.md").read_text(encoding="utf-8").splitlines():
        directive = DIRECTIVE.match(line)
        if not directive:
            text.append(line)
            continue
        add("\n".join(text))
        name, argument = directive.groups()
        if name == "setup":
            cells.append(("code", SETUP.format(stage=stage)))
        elif name == "lesson":
            for number in argument.split():
                add(section(lesson, number))
        else:
            path, *names = argument.split()
            cells.append(("code", sources(ROOT / path, names)))
    add("\n".join(text))
    return cells


def blocks(page):
    """Yield ("text", ...) and ("code", ...) in the order of a page; a quotation and its caption are text."""
    text, code, fence = [], None, None
    for line in page.splitlines():
        if code is not None:
            if line == "```":
                yield "code", "\n".join(code)
                code = None
            else:
                code.append(line)
        elif fence is None and line == "```python" and not follows_caption(text):
            if source := "\n".join(text).strip():
                yield "text", source
            text, code = [], []
        else:
            if line.startswith("```"):
                fence = None if fence else line
            text.append(line)
    if source := "\n".join(text).strip():
        yield "text", source


def follows_caption(lines):
    """Whether the last line that is not empty is the caption of a quotation."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    return bool(CAPTION.match(last))


def as_cell(source, modules):
    """The source of a code cell from a block of a page. modules: the files of the lesson so far; it may grow."""
    if match := re.match(r"# (\w+)\.py\n", source):
        modules.add(match[1])
        source = source[match.end() :]
    lines = [line for line in source.splitlines() if not re.match(rf"from ({'|'.join(modules) or '$'}) import", line)]
    return "\n".join(lines).strip()


def section(lesson, number):
    """The section of a lesson with this number, with its heading."""
    found = re.search(rf"^## {number}\. .*?(?=^## |\Z)", lesson, re.M | re.S)
    if not found:
        raise ValueError(f"the lesson has no section {number}")
    return found[0]


def sources(path, names):
    """The source of functions, classes and constants at the top level of a file, in the order of `names`."""
    with tokenize.open(path) as file:
        text = file.read()
    found = {}
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        name = getattr(target, "id", None) or getattr(target, "name", None)
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        found[name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path.relative_to(ROOT)} has no {', '.join(missing)}")
    return "\n\n\n".join(found[name] for name in names)


def is_current(stage):
    """Whether the notebook of a stage has the cells of build(), and the outputs of one run of all of them.

    The outputs themselves are not compared, because they contain times.
    """
    cells = nbformat.read(notebook_path(stage), as_version=4).cells if notebook_path(stage).exists() else []
    runs = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    return runs == [*range(1, len(runs) + 1)] and [(cell.cell_type, cell.source) for cell in cells] == [
        (cell.cell_type, cell.source) for cell in build(stage).cells
    ]


def write(path, notebook):
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main():
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a notebook is out of date")
    check, stale = parser.parse_args().check, []
    for stage in STAGES:
        path = notebook_path(stage)
        if check:
            stale += [] if is_current(stage) else [path]
        else:
            from run import execute  # run.py imports this file

            write(path, build(stage))
            notebook, seconds = execute(stage)
            write(path, notebook)
            print(f"{path.relative_to(ROOT)}: {len(notebook.cells)} cells, {seconds:.0f} s", flush=True)
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date: run python docs/notebooks/build.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    run_command(Solo, lambda world: main())
