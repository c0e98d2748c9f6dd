"""Summaries of timing samples, Markdown tables, and the JSON files in results/ with date, commit and hardware."""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from gpt2core.app.doctor import version_of
from gpt2core.app.settings.flag_parser import Parser
from gpt2core.errors import ConfigError, counted
from gpt2core.presets import PRESETS
from gpt2core.tuned_choices import processor
from testing.jobs import ROOT

# Fields of results that hold lists of measured samples: save() replaces each of these lists by its summary.
SAMPLES = {
    "seconds", "unread_seconds", "warm_up_seconds", "naive_seconds", "our_seconds", "totals", "first", "token", "total",
    "cpu", "ms", "plain", "ours", "gflops",
}  # fmt: skip

# -- statistics -------------------------------------------------------------------------------------------------------


def summary(samples):
    """{"median", "q1", "q3", "n"} of a list of numbers; None for an empty list.

    q1 and q3 are the quartiles, interpolated linearly between samples as numpy.percentile does; n is the number of
    samples. `samples` may also contain lists of numbers. Each number of such a list is one sample.
    """
    samples = [value for item in samples for value in (item if isinstance(item, list | tuple) else [item])]
    if not samples:
        return None
    q1, _, q3 = statistics.quantiles(samples, method="inclusive") if len(samples) > 1 else samples * 3
    return {"median": statistics.median(samples), "q1": q1, "q3": q3, "n": len(samples)}


def paired_ratio(numerator, denominator):
    """The summary of the ratios numerator / denominator, one ratio for each round.

    Both arguments have one number for each round. A disturbance that slows a whole round cancels in the ratio of this
    round. paired_ratio(times of a peer, our times) says how many times as fast as the peer we are.
    """
    return summary([a / b for a, b in zip(numerator, denominator, strict=True)])


def round_medians(rounds):
    """[the median of each round]; `rounds` is a list of rounds, each a list of samples."""
    return [statistics.median(samples) for samples in rounds]


def add_step_fields(results):
    """Add "cores_used" to results; return {name: [the median step of each round]}.

    A result has "seconds", a list per round with a number per step, and the "cpu_seconds" of all steps.
    """
    for result in results:
        result["cores_used"] = result["cpu_seconds"] / sum(sum(result["seconds"], []))
    return {result["name"]: round_medians(result["seconds"]) for result in results}


def add_ratios(results, field, base_of):
    """Do add_step_fields(), and add `field`, the time of a result / the time of the result base_of(its name)."""
    medians = add_step_fields(results)
    for result in results:
        result[field] = paired_ratio(medians[result["name"]], medians[base_of(result["name"])])


def add_peer(own, results, ratios, field="seconds"):
    """Add "peer", the fastest program of PyTorch in `results`, and "ratio", its time / ours, to our result `own`.

    ratios: {name of a result: its time / ours}. field: of the times. Nothing is added without a program of PyTorch.
    """
    peers = [each for each in results if each["name"].startswith("torch") and "bf16" not in each["name"]]
    if peers:
        peer = min(peers, key=lambda each: summary(each[field])["median"])
        own |= {"peer": {"name": peer["name"], field: peer[field]}, "ratio": ratios[peer["name"]]}


def compare_norms(result, own, tolerance):
    """Report a result whose norms differ from those of `own`, our result, by `tolerance` or more, relatively."""
    difference = max(abs(a / b - 1) for a, b in zip(result["norms"], own["norms"], strict=True))
    if not difference < tolerance:  # also if it is not a number
        norms = f"norms {result['norms']} and {own['norms']}"
        print(f"{result['name']} and {own['name']} give different results: {norms}")


def summarised(results, field=None):
    """A copy of `results` in which each list under a field in SAMPLES is replaced by its summary.

    None in such a list is ignored. field: the field that contains `results`; None for the whole results.
    """
    if isinstance(results, dict):
        samples_field = field if field in SAMPLES else None  # {"ms": {"forward": [...], ...}} holds samples too
        return {key: summarised(value, samples_field or key) for key, value in results.items()}
    if isinstance(results, list | tuple):
        if field in SAMPLES:
            return summary([value for value in results if value is not None])
        return [summarised(value) for value in results]
    return results


# -- tables -----------------------------------------------------------------------------------------------------------


def print_table(rows):
    """Print a Markdown table. rows: dictionaries with the same keys, which become the header."""
    header = list(rows[0])
    cells = [header, ["---"] + ["---:"] * (len(header) - 1), *([str(row[key]) for key in header] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    for line in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


# -- results/ ---------------------------------------------------------------------------------------------------------


def hardware():
    """The hardware of this machine and the versions of its software, as save() records them."""
    import numpy
    import threadpoolctl

    libraries = [each for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]
    kernels = [each["architecture"] for each in libraries if each["internal_api"] == "openblas"]
    blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        "blas_kernels": kernels[0] if kernels else None,
        **{name: version_of(name) for name in ("mkl", "torch", "mpi4py", "mpich")},
        **gpu_hardware(),
    }


def cpu():
    """The name of the CPU."""
    if sys.platform == "darwin":
        return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    return processor()


def cpu_suffix():
    """The end of the names of the files about this kind of CPU, "" for others. Shipped files without it: AMD Zen 4."""
    if "Intel" in cpu():
        return "_intel"
    if "AMD" not in cpu():
        return ""
    family, has_avx512 = cpu_field("cpu family"), "avx512f" in cpu_field("flags").split()  # Zen 3 and 4: family 25
    return {("25", False): "_zen3", ("26", True): "_zen5"}.get((family, has_avx512), "")


def cpu_field(name):
    """A field of an x86 CPU in Linux's /proc/cpuinfo, for example "cpu family"; "" if it is not known."""
    path = Path("/proc/cpuinfo")
    found = path.exists() and re.search(rf"^{name}\s*:\s*(.+)$", path.read_text(encoding="utf-8"), re.M)
    return found[1] if found else ""


def gpu_hardware():
    """The GPU, its driver and the Python packages that use it; {} if there is no GPU."""
    gpus = nvidia_smi("name", "driver_version", "power.limit")
    if not gpus:
        return {}
    name, driver, power_limit = gpus[0]
    cupy = {package: version_of(package) for package in ("cupy", "cupy-cuda13x", "cupy-cuda12x")}
    return {
        "gpu": name,
        "gpus": len(gpus),
        "driver": driver,
        "power_limit": power_limit,
        "cupy": next((f"{package} {version}" for package, version in cupy.items() if version), None),
        "triton": version_of("triton"),
    }


def nvidia_smi(*fields):
    """[[value of each field, as text] for each visible GPU]; [] if there is no GPU.

    fields: names of `nvidia-smi --query-gpu`; `nvidia-smi --help-query-gpu` lists them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if visible is not None:
        command.append(f"--id={visible}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]


def check_gpus(count):
    """Raise ConfigError if there are fewer than `count` GPUs. Triton's interpreter needs none."""
    if not os.environ.get("TRITON_INTERPRET") and (found := len(nvidia_smi("index"))) < count:
        raise ConfigError(f"this benchmark needs {counted(count, 'GPU')}, {found} found: use a machine with GPUs")


def commit():
    """The current commit. It has the suffix `-dirty` if files outside results/ differ from the commit."""
    git = ["git", "-C", str(ROOT)]
    try:
        described = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or this is not a repository
        return "unknown"
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!results"], check=False).returncode
    return described.stdout.strip() + "-dirty" * bool(changed)


def to_json(record):
    """`record` as JSON with an indent of one space, and each summary() on one line."""
    text = json.dumps(record, indent=1) + "\n"
    return re.sub(r'\{\s+("median":[^{}\[\]]*?)\s+\}', lambda found: "{" + re.sub(r"\s+", " ", found[1]) + "}", text)


FLAGS = {  # {name: help text} of flags of several benchmarks
    "preset": "model",
    "device": "cuda, or cpu for a trial",
    "precision": "precision",
    "ranks": "ranks of a job; on GPUs, each rank has its own",
    "stage": "1: on CPUs; 3: on GPUs",
    "threads": "CPU threads of each process",
    "rounds": "number of rounds; each round times every program",
    "steps_per_round": "timed steps of each program in a round",
    "warm_up": "steps or runs before the first measurement",
    "repeats": "measured runs of each row",
    "milliseconds": "approximate device time of one round",
    "timeout": "seconds that one round of a program, or one run, may take",
    "batch_size": "sequences per step over all ranks",
    "seq_len": "tokens per sequence",
    "batch": "sequences of a rank",
    "context": "tokens of a sequence",
    "micro_batches": "micro-batches per step",
    "bucket_mb": "minimum bucket size in 10^6 bytes",
    "times": "number of kills of a rank",
    "steps": "steps of each run",
    "eval_every": "steps between validations",
    "checkpoint_every": "steps between checkpoints",
    "seed": "seed of what is chosen at random",
    "no_compile": "measure PyTorch only without torch.compile, which needs a C++ compiler",
    "no_ddp": "do not run PyTorch",
    "no_torch": "do not run PyTorch",
}
CHOICES = {
    "preset": PRESETS,
    "precision": ("fp32", "tf32", "bf16"),
    "device": ("cuda", "cpu"),
    "stage": (1, 3),
}  # values of flags


class BenchmarkParser(Parser):
    """A Parser that refuses a number that is not positive, or not below LIMITS; the numbers of MAY_BE_0 may be 0."""

    MAY_BE_0 = "warm_up", "warmup", "seed", "seeds", "zero", "stage", "stages"  # names of flags
    LIMITS = {"ranks": 1 << 10, "threads": 1 << 10}  # of flags that start processes or threads; others: 2^31

    def add_flags(self, **defaults):
        """Add flags of FLAGS with these defaults. A list: the flag takes one or more values. False: it takes none.

        A dictionary: the arguments of add_argument() for a flag that is not in FLAGS. "save_as" in it: the default of
        --save-as with this flag, because its results belong to another table.
        """
        for name, default in defaults.items():
            flag, text = f"--{name.replace('_', '-')}", FLAGS.get(name)
            if isinstance(default, dict):
                default = dict(default)
                if save_as := default.pop("save_as", ""):
                    default["help"] += f" (saved as {save_as})"
                self.add_argument(flag, **default).save_as = save_as
                continue
            if default is False:
                self.add_argument(flag, action="store_true", help=text)
                continue
            values, several = (default, {"nargs": "+"}) if isinstance(default, list) else ([default], {})
            shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
            text += f"{'; one or more' * bool(several)} (default {shown})"
            kind = {"type": type(values[0]), "choices": CHOICES.get(name)}
            self.add_argument(flag, default=default, help=text, **kind, **several)

    def parse_args(self, arguments=None, namespace=None):
        options = super().parse_args(arguments, namespace)
        for action in self._actions:
            values = getattr(options, action.dest, None)
            for value in values if isinstance(values, (list, tuple)) else [values]:
                zero, limit = value == 0 and action.dest in self.MAY_BE_0, self.LIMITS.get(action.dest, 1 << 31)
                if action.type in (int, float) and value is not None and not (0 < value < limit or zero):  # NaN too
                    self.error(f"argument {action.option_strings[0]}: {value} must be positive and below {limit}")
            if values and getattr(action, "save_as", ""):
                options.save_as = options.save_as or action.save_as
        if "save_as" in options:
            options.save_as = options.save_as or options.benchmark.split(".")[-1]
        return options


def benchmark_parser(benchmark, docstring, saves=True, **flags):
    """The Parser of `python -m BENCHMARK`, whose --help has the lines of its docstring.

    The lines "python -m BENCHMARK flags  # comment" of the docstring are its examples. saves: whether to add the flags
    of save(). flags: see add_flags().
    """
    command = re.compile(rf"^ *python -m {re.escape(benchmark)}(.*?) +# (.*)\n", re.MULTILINE)
    examples = [(flags.strip(), comment) for flags, comment in command.findall(docstring)]
    keep_lines = argparse.RawDescriptionHelpFormatter
    text = command.sub("", docstring)
    parser = BenchmarkParser(text, examples, f"python -m {benchmark}", formatter_class=keep_lines)
    parser.set_defaults(benchmark=benchmark)
    if saves:
        add, name = parser.add_argument, benchmark.split(".")[-1]
        add("--save", action="store_true", help="write to results/, which git tracks (default: to out/results/)")
        add("--save-as", help=f"name of the results file, without .json (default {name})")
        add("--commit", help="commit to record in the results file (default: the one that git reports)")
    parser.add_flags(**flags)
    return parser


def save(results, args, name=None, group=None):
    """Write `results` with the date, commit, command line and hardware to <group>/<name>.json. Returns the path.

    args.benchmark: "benchmarks.<group>.<module>"; another `group` replaces this one. name: by default args.save_as. In
    the groups cpu and ranks, the name also gets the cpu_suffix(). The file is in results/ if args.save is true, else in
    out/results/. args.commit replaces the detected commit. Lists of measured samples are written as their summaries;
    see SAMPLES.
    """
    group = group or args.benchmark.split(".")[-2]
    kind = cpu_suffix() if group in ("cpu", "ranks") else ""
    file = Path("results", group, f"{name or args.save_as}{kind}.json")
    path = ROOT / file if args.save else ROOT / "out" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit or commit(),
        "command": " ".join(["python", "-m", args.benchmark, *sys.argv[1:]]),
        "hardware": hardware(),
        "results": summarised(results),
    }
    path.write_text(to_json(record))
    hint = "" if args.save else f"; --save writes {file}"
    machine = [record["hardware"].get(name) for name in ("cpu", "cores", "blas", "blas_kernels")]
    print("\n{}, {} cores, {} with {} kernels".format(*machine))
    print(f"Written to {path.relative_to(ROOT)}, commit {record['commit']}{hint}.", flush=True)
    return path


def save_each(args, measured, *shows):
    """Save the results of one table after another, so that an interrupted run keeps its finished tables; return all.

    measured: an iterator of the results of each table, lists. shows: functions that print such a list.
    """
    results = []
    for of_table in measured:
        for show in shows:
            show(of_table)
        results += of_table
        save(results, args)
    return results
