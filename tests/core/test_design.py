"""The rules of the layout: which file may import which, no branch on ranks or devices, and a stage is two objects.

The library import-linter is not used for the imports: it does not see import_module(), has no lists of allowed modules
except as exceptions to forbidden ones, and needs a change of its configuration for each new stage or folder.
"""

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.harness.report import FLAGS
from gpt2core.app import cli

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
STAGES = sorted(path.name for path in ROOT.glob("stage[0-9]_*") if (path / "__init__.py").exists())
CORE = sorted((ROOT / "gpt2core").rglob("*.py"))
BRIDGE = sorted((ROOT / "torch_bridge").rglob("*.py"))
API = sorted((ROOT / "staged_gpt2").rglob("*.py"))
EXERCISES = sorted((ROOT / "exercises").rglob("*.py"))
LESSON = "first.py"  # a file that the lesson of stage 2 tells a reader to save
CODE = CORE + sorted(file for stage in STAGES for file in (ROOT / stage).rglob("*.py") if file.name != LESSON)
READMES = [path for path in (ROOT / "README.md", *(ROOT / stage / "README.md" for stage in STAGES)) if path.exists()]


def name_of(path):
    return str(path.relative_to(ROOT))


def for_each(paths):
    """A decorator: one test that calls a function with each path and names every path for which it fails.

    pytest would need more time for a test of each rule and file than the rules need.
    """

    def decorate(rule):
        def test():
            failed = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    failed.append(f"{name_of(path)}: {error}")
            if failed:
                pytest.fail("\n".join(failed), pytrace=False)
            assert paths

        test.__doc__ = rule.__doc__
        return test

    return decorate


def test_each_file_that_breaks_a_rule_is_named():
    @for_each([ROOT / name for name in ("README.md", "Makefile", "CONTRIBUTING.md")])
    def rule(path):
        assert "." not in path.name, "is a page"

    with pytest.raises(pytest.fail.Exception) as failure:
        rule()
    assert re.findall(r"^(\S+): is a page", str(failure.value), re.M) == ["README.md", "CONTRIBUTING.md"]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_bytes(), name_of(path))


def imported(tree):
    """The first component of every module that the tree imports. A relative import keeps its leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "").split(".")[0]


@for_each(CORE)
def test_the_core_imports_no_stage(path):
    assert not [module for module in imported(tree_of(path)) if re.match(r"\.|stage|torch|cupy|triton|mpi4py", module)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_what_it_adds_to(stage):
    # Stage 3 is the product of stages 1 and 2; stages 0, 1 and 2 stand on the core, and stage 1 on stage 0's arrays.
    allowed = {"0": "0", "1": "01", "2": "2", "3": "123"}[stage[5]]
    for path in (ROOT / stage).rglob("*.py"):
        others = [module for module in imported(tree_of(path)) if module.startswith("stage")]
        assert [module for module in others if module[5] not in allowed] == [], name_of(path)


@for_each(BRIDGE)
def test_of_the_stages_the_bridge_imports_only_kernels_of_stage_2_and_their_launches(path):
    found = imports_below(path, *STAGES, "gpt2core")
    rooms = tuple(f"stage2_cuda.{room}." for room in ("attention", "kernels", "runtime"))
    allowed = (*rooms, "gpt2core.parallel.", "gpt2core.errors.")
    assert [name for name in found if not name.startswith(allowed)] == []


@for_each(BRIDGE)
def test_importing_the_bridge_imports_neither_cupy_nor_mpi(path):
    """Nor does any file of this repository that it imports, directly or through others."""
    reached, unread = set(), {path}
    while unread:
        file = unread.pop()
        reached.add(file)
        tree = ast.Module([node for node in tree_of(file).body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        assert not {"cupy", "mpi4py"} & set(imported(tree)), name_of(file)
        parts = [name.split(".") for name in modules_imported(tree)]
        files = {ROOT.joinpath(*name[:end]).with_suffix(".py") for name in parts for end in range(1, len(name) + 1)}
        unread |= {file for file in files if file.exists()} - reached
    assert len(reached) > 1 or not imports_below(path, *STAGES, "gpt2core", "torch_bridge")


@for_each(CODE)
def test_neither_the_core_nor_a_stage_imports_the_bridge(path):
    assert imports_below(path, "torch_bridge") == []


@for_each(CODE + BRIDGE + API)
def test_neither_the_core_nor_a_stage_nor_the_bridge_nor_the_api_imports_the_exercises(path):
    assert imports_below(path, "exercises") == []


@for_each(CODE + BRIDGE + EXERCISES)
def test_nothing_imports_the_api(path):
    """staged_gpt2 is above the stages, as their scripts are."""
    assert imports_below(path, "staged_gpt2") == []


@for_each([path for path in EXERCISES if path.parent.name != "checks"])
def test_only_the_checks_of_the_exercises_import_kernels_and_stages(path):
    """The commands read the source of a stage, but never import it: a student's file may be broken."""
    found = imports_below(path, *STAGES, "gpt2core", "testing")
    allowed = ("gpt2core.app.", "gpt2core.communicator.", "gpt2core.errors.", "gpt2core.text.input_file.")
    assert [name for name in found if not name.startswith(allowed)] == []


def test_no_benchmark_imports_pytest_or_a_test():
    for path in (ROOT / "benchmarks").rglob("*.py"):
        assert not {"tests", "pytest"} & set(imported(tree_of(path))), name_of(path)


def modules_imported(tree):
    """The full dotted name of everything that the tree imports: `from a.b import c` gives a.b.c, c module or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_below(path, *packages):
    """The modules of `packages` that a file imports."""
    return [name for name in modules_imported(tree_of(path)) if f"{name}.".startswith(tuple(f"{p}." for p in packages))]


@for_each(sorted((ROOT / "gpt2core").glob("*.py")))
def test_the_top_level_computes_and_the_folders_above_make_it_fast(path):
    """Without the folders, a model can be trained in one process."""
    folders = {f"gpt2core.{file.parent.name}" for file in (ROOT / "gpt2core").glob("*/*.py")}
    assert imports_below(path, *sorted(folders)) == []


@for_each(sorted((ROOT / "gpt2core" / "parallel").rglob("*.py")))
def test_parallel_imports_neither_the_trainer_nor_a_loop_nor_the_engine(path):
    trainer = [] if path.name == "parallel_trainer.py" else ["gpt2core.trainer"]
    assert imports_below(path, *trainer, "gpt2core.training_loop", "gpt2core.engine") == []


# {folder on Python's path: the packages in it}: the code of the repository
SOURCES = {
    ROOT: ("gpt2core", *STAGES, "staged_gpt2", "torch_bridge", "exercises", "testing", "benchmarks", "data", "tests"),
    ROOT / "docs" / "notebooks": ("walkthrough",),
}


def modules():
    """{dotted name: path} of every module of the repository; the name of an __init__.py is that of its package."""
    found = {}
    for folder, packages in SOURCES.items():
        for path in (path for package in packages for path in (folder / package).rglob("*.py")):
            found[".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def modules_of(tree, known):
    """The modules of `known` that a file imports: at its top or in a function, by a statement or by import_module()."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in names if {name, node.module} & known)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module") and node.args:
            if isinstance(node.args[0], ast.Constant):
                yield from {node.args[0].value} & known
            elif isinstance(node.args[0], ast.JoinedStr):  # import_module(f"package.{name}"): any module of the package
                start = ast.literal_eval(node.args[0].values[0]) if node.args[0].values[0:1] else ""
                yield from (name for name in known if start and name.startswith(start))


def in_circles(imports):
    """The modules that import themselves, directly or through others. imports: {module: the modules it imports}."""
    found = set()
    for module in imports:
        reached, unread = set(), list(imports[module])
        while unread:
            name = unread.pop()
            if name not in reached:
                reached.add(name)
                unread += imports[name]
        if module in reached:
            found.add(module)
    return found


def test_no_two_modules_import_each_other():
    """Neither directly nor through others, nor in a function."""
    found = modules()
    imports = {name: set(modules_of(tree_of(path), found.keys())) - {name} for name, path in found.items()}
    assert in_circles(imports) == set()
    assert {"gpt2core.ops", "stage2_cuda.runtime", "benchmarks.harness.tables", "walkthrough.setup"} <= found.keys()


@pytest.mark.parametrize("folder", ["gpt2core", "gpt2core.app", "gpt2core.parallel", "stage2_cuda"])
def test_no_two_packages_of_a_folder_import_each_other(folder):
    """Neither directly nor through others; the modules may form no circle."""
    found = modules()
    packages = {name for name in found if found[name].name == "__init__.py" and name.rpartition(".")[0] == folder}

    def package_of(module):
        return next((package for package in packages if f"{module}.".startswith(f"{package}.")), None)

    imports = {package: set() for package in packages}
    for name, path in found.items():
        if package := package_of(name):
            imports[package] |= set(map(package_of, modules_of(tree_of(path), found.keys()))) - {package, None}
    assert len(packages) > 1 and in_circles(imports) == set()


def test_a_circle_is_found_and_an_import_in_a_function_too():
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"b", "c"}
    text = (
        "import a\ndef f():\n    from p import b, value\n    import_module('p.c')\n    x.import_module(f'q.{name}')\n"
    )
    known = {"a", "p", "p.b", "p.c", "q.d", "q.e", "r"}
    assert set(modules_of(ast.parse(text), known)) == known - {"r"}


@for_each(sorted((ROOT / "stage2_cuda" / "runtime").glob("*.py")))
def test_the_runtime_of_stage_2_imports_nothing_that_needs_it(path):
    found = imports_below(path, "stage2_cuda")
    assert [name for name in found if not name.startswith("stage2_cuda.runtime.")] == []


@for_each(sorted((ROOT / "testing").glob("*.py")))
def test_what_tests_benchmarks_and_exercises_share_imports_none_of_them(path):
    assert imports_below(path, "tests", "benchmarks", "exercises", "pytest") == []


@for_each(CODE + BRIDGE + API)
def test_neither_the_core_nor_a_stage_nor_the_bridge_nor_the_api_imports_fakes(path):
    assert imports_below(path, "testing") == []


def test_an_installed_module_imports_only_installed_modules():
    """`pip install .` installs neither benchmarks/ nor tests/, nor their packages."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = modules()
    installed = {name: path for name, path in found.items() if ".".join(path.relative_to(ROOT).parts[:-1]) in packages}
    for path in installed.values():
        assert set(modules_of(tree_of(path), found.keys())) <= installed.keys(), name_of(path)
        assert imports_below(path, "pytest", "hypothesis") == [], name_of(path)
    assert {"exercises.checks.canonical_all_reduce", "testing.fake_gpu", "gpt2core.app.cli"} <= installed.keys()


MOST_BRANCHES = 15  # of a function; one with more does several things
BRANCHES = ast.If | ast.For | ast.While | ast.ExceptHandler | ast.IfExp | ast.comprehension


def branches(function):
    """How many if, for, while, except, and, or, conditional expressions and comprehensions a function has."""
    nodes = list(ast.walk(function))
    operators = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return operators + sum(isinstance(node, BRANCHES) for node in nodes)


@for_each(CORE)
def test_no_function_of_the_core_has_too_many_branches(path):
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
    assert {each.name: branches(each) for each in functions if branches(each) > MOST_BRANCHES} == {}


@for_each([path for path in CODE if "/app/" not in name_of(path)])
def test_only_app_and_the_scripts_of_a_stage_import_app(path):
    scripts = "train_gpt2.py", "inference.py", "calibrate.py"  # the last is the program that `plan --calibrate` starts
    assert path.name in scripts or imports_below(path, "gpt2core.app") == []


@for_each(sorted((ROOT / "tests").rglob("*.py")))
def test_no_test_imports_from_another_test(path):
    found = imports_below(path, "tests")
    assert [name for name in found if not name.startswith(("tests.support.", "tests.tools."))] == []


IMPORT_CORE = f"""
import importlib, os, sys
before = dict(os.environ), sys.excepthook
for name in {[".".join(p.relative_to(ROOT).with_suffix("").parts) for p in CORE if "/app/" not in str(p)]}:
    importlib.import_module(name.removesuffix(".__init__"))
assert dict(os.environ) == before[0], set(os.environ.items()) ^ set(before[0].items())
assert sys.excepthook is before[1], sys.excepthook
"""


def test_importing_the_core_changes_neither_the_environment_nor_the_excepthook():
    """Both belong to the command line, which is gpt2core.app."""
    done = subprocess.run([sys.executable, "-c", IMPORT_CORE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMMANDS = ("gpt2core/app/", "stage1_mpi/launch.py", "stage1_mpi/host_file.py")  # their users give flags


@for_each([path for path in CODE if not name_of(path).startswith(COMMANDS)])
def test_an_error_of_the_library_names_settings_and_no_flags(path):
    """`batch_size=15`, not --batch-size 15: a user of the library gives no flags. A command prints flags."""
    raised = [part for node in ast.walk(tree_of(path)) if isinstance(node, ast.Raise) for part in ast.walk(node)]
    texts = [part.value for part in raised if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    assert [text for text in texts if re.search(r"--[a-z]", text)] == []


# -- no branch on the number of ranks or on the device ----------------------------------------------------------------

# A rank count or a device by its name: `world.size`, `world_size`, `n_ranks`, `is_cuda`, `use_gpu`.
RANKS = re.compile(r"(world|group|communicator|comm)\.(size|rank)$|(^|\.|_)(world_size|ranks?|n_ranks|local_rank)$")
DEVICES = re.compile(r"(is|use|has|if|on)_?(distributed|ddp|mpi|parallel|cuda|gpu|cpu|nccl|cupy|numpy)|\bdevice$")
# These files implement the groups, so they compare ranks; no other file needs to.
COMMUNICATORS = re.compile(r"communicator\.py$|collectives\.py$|import_mpi\.py$")


def conditions(tree):
    """Every expression that decides what runs next."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.BoolOp):
            yield from node.values


def dotted(node):
    """`self.world.size` of an attribute chain, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def counted_against_a_number(node):
    """Whether `node` compares a number of ranks, or a rank, with a literal, or asks for its truth."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        numbers = any(isinstance(side, ast.Constant) and isinstance(side.value, int) for side in sides)
        return numbers and any(RANKS.search(dotted(side)) for side in sides)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return counted_against_a_number(node.operand)
    return bool(RANKS.search(dotted(node)))


def branches_on_ranks(tree):
    for test in conditions(tree):
        if any(counted_against_a_number(node) for node in [test, *ast.walk(test)] if isinstance(node, ast.Compare)):
            yield ast.unparse(test)
        elif counted_against_a_number(test):
            yield ast.unparse(test)


def branches_on_devices(tree):
    for test in conditions(tree):
        names = {dotted(node) for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute)}
        strings = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)} - {None}
        kinds = strings & {"cpu", "cuda", "gpu", "numpy", "cupy"}
        backends = {name for name in names if name.endswith("Backend") or name == "backend.name"}
        if kinds or backends or any(DEVICES.search(name) for name in names):
            yield ast.unparse(test)


@for_each([path for path in CODE if not COMMUNICATORS.search(path.name)])
def test_no_branch_on_the_number_of_ranks(path):
    assert list(branches_on_ranks(tree_of(path))) == []


@for_each(CODE)
def test_no_branch_on_the_device(path):
    assert list(branches_on_devices(tree_of(path))) == []


@pytest.mark.parametrize(
    "line, found",
    [
        ("if world_size > 1: pass", branches_on_ranks),
        ("if self.world.rank == 0: pass", branches_on_ranks),
        ("x = y if 1 < group.size else z", branches_on_ranks),
        ("x = [y for y in z if not rank]", branches_on_ranks),
        ("while ok and world.size != 1: pass", branches_on_ranks),
        ("rank == 0 and save()", branches_on_ranks),
        ("if use_cuda: pass", branches_on_devices),
        ("if backend.name == 'numpy': pass", branches_on_devices),
        ("if isinstance(backend, NumpyBackend): pass", branches_on_devices),
        ("assert not self.is_distributed", branches_on_devices),
    ],
)
def test_these_lines_would_be_found(line, found):
    assert list(found(ast.parse(line)))


@pytest.mark.parametrize("line", ["if batch % group.size: pass", "if x.size > 1: pass", "if threads > 1: pass"])
def test_these_lines_are_allowed(line):
    assert not list(branches_on_ranks(ast.parse(line))) and not list(branches_on_devices(ast.parse(line)))


# A launcher passes rank and size to its processes through the environment only; these files read it.
READ_LAUNCHER = ("gpt2core/parallel/launcher_env.py", "stage1_mpi/launch.py", "stage1_mpi/import_mpi.py")
ENVIRONMENT = (*READ_LAUNCHER, "stage2_cuda/runtime/cupti.py")  # the last sets a variable for torch.profiler


def nested_targets(tree):
    """The lines of assignments in kernels (functions with the decorator `jit`) to a tuple that contains a tuple."""
    for function in ast.walk(tree):
        names = [ast.unparse(each) for each in getattr(function, "decorator_list", ())]
        if any(re.search(r"\bjit\b", name) for name in names):
            for node in ast.walk(function):
                for target in node.targets if isinstance(node, ast.Assign) else ():
                    parts = target.elts if isinstance(target, ast.Tuple) else ()
                    if any(isinstance(part, ast.Tuple) for part in parts):
                        yield node.lineno


KERNELS = [path for path in CODE + EXERCISES if "jit\n" in path.read_text(encoding="utf-8")]


@for_each(KERNELS)
def test_no_kernel_assigns_to_a_tuple_in_a_tuple(path):
    """Triton 3.9 compiles such a line, Triton 3.6 ends with a TypeError."""
    assert list(nested_targets(tree_of(path))) == []


def test_a_tuple_in_a_tuple_is_found():
    text = "@triton.jit\ndef kernel(x):\n    (a, b), c = x\n    a, b = x\n\ndef host(x):\n    (a, b), c = x\n"
    assert list(nested_targets(ast.parse(text))) == [3]


@for_each([path for path in CODE if path.name not in ("tensor.py", "parameter.py", "trainer.py")])
def test_only_methods_of_a_parameter_set_its_buffer_and_its_gradient(path):
    stored = [node for node in ast.walk(tree_of(path)) if isinstance(getattr(node, "ctx", None), ast.Store)]
    assert not {node.attr for node in stored if isinstance(node, ast.Attribute)} & {"buffer", "grad"}


@for_each([path for path in CODE if name_of(path) not in ("gpt2core/app/__init__.py", *ENVIRONMENT)])
def test_no_environment_is_read_in_the_middle_of_code(path):
    tree = tree_of(path)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not names & {"environ", "getenv", "environb", "putenv"}


# -- a stage is two objects -------------------------------------------------------------------------------------------


def skeleton(path):
    """The source of a stage's script without its docstring, its imports and the names of its two objects."""
    tree = ast.parse(path.read_bytes())  # not tree_of(): it is changed below
    body = [node for node in tree.body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.keyword) and node.arg in ("backend", "world"):
            assert isinstance(node.value, ast.Name | ast.Attribute), f"{name_of(path)}: {ast.unparse(node)} is no name"
            node.value = ast.Name("chosen")
    return "\n".join(map(ast.unparse, body))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("script, function", [("train_gpt2.py", "train"), ("inference.py", "infer")])
def test_the_scripts_of_all_stages_differ_only_in_imports_number_and_constructors(stage, script, function):
    number = re.match(r"stage(\d)_", stage)[1]
    assert skeleton(ROOT / stage / script) == (
        "sys.path.append(str(Path(__file__).resolve().parents[1]))\n"
        f"def main():\n    {function}(stage={number}, backend=chosen, world=chosen)\n"
        "if __name__ == '__main__':\n    main()"
    )


def test_a_console_script_runs_main_of_each_script_of_a_stage():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    modules = {f"{stage}.{script}:main" for stage in STAGES for script in ("train_gpt2", "inference")}
    assert set(scripts.values()) == modules | {"gpt2core.app.doctor:main"} and len(scripts) == 2 * len(STAGES) + 1


# -- what a reader sees ----------------------------------------------------------------------------------------------


@for_each(CODE + EXERCISES + sorted((ROOT / "tests").rglob("*[a-z].py")))
def test_a_file_opens_with_its_thesis(path):
    thesis = (ast.get_docstring(tree_of(path)) or "").split("\n")[0]
    assert len(thesis) > 20 and thesis[-1] in ".:?", f"{name_of(path)} opens with {thesis!r}"


def tracked_files():
    """Every file that git tracks; files that a user has added, such as the checkpoints of a run, are not among them."""
    command = ["git", "ls-files", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git cannot list the tracked files: there is no git, or this is no git checkout")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def test_the_files_that_a_user_has_added_are_not_searched(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(pytest.skip.Exception, match="git cannot list the tracked files"):
        tracked_files()  # not a git checkout
    for name in ("added.py", "state.json"):
        (tmp_path / name).touch()
    for words in (["init", "-q"], ["add", "added.py"]):
        if not shutil.which("git") or subprocess.run(["git", *words], cwd=tmp_path).returncode:
            pytest.skip("there is no git")
    assert tracked_files() == [tmp_path / "added.py"]


def test_no_file_names_a_path_of_one_machine():
    absolute = re.compile(rb"(?<![\w.])/(?:home|root|work|Users|mnt)/[\w.]")
    assert [name_of(path) for path in tracked_files() if absolute.search(path.read_bytes())] == []


def test_every_package_is_listed_for_installation():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    roots = [ROOT / name for name in ("gpt2core", *STAGES, "staged_gpt2", "torch_bridge", "exercises", "testing")]
    there = [path.parent for root in roots if root.exists() for path in root.rglob("__init__.py")]
    shipped = ["gpt2core.shipped"]  # data/, which has no __init__.py
    assert sorted(packages) == sorted([".".join(path.relative_to(ROOT).parts) for path in there] + shipped)


@for_each(READMES)
def test_the_flags_that_a_page_names_exist(path):
    parsers = (cli.train_parser(), cli.inference_parser())
    known = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    known |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / "data" / "prepare.py").read_text()))
    known |= {f"--{name.replace('_', '-')}" for name in FLAGS}
    for script in (ROOT / "benchmarks").rglob("*.py"):
        text = script.read_text()
        known |= set(re.findall(r'"(--[a-z-]+)"', text))
        known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^ +\"?(\w+)\"?(?:=|: )dict\(", text, re.M)}
    known |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / "stage1_mpi" / "launch.py").read_text()))
    known |= {"--extra-index-url", "--index-url", "--upgrade", "--hostfile", "--mca"}  # of pip and mpirun
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", path.read_text(encoding="utf-8")))
    assert named - known == set()
