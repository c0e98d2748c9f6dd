"""How many microseconds does a generated token take on the GPU, compared with PyTorch?

For each case a search finds the fastest variant of PyTorch's program, which is then compared with this project's; or
--options says which one. With --variants, the same search finds the fastest constants of this project's kernels.

    python -m benchmarks.gpu.decode                           # all cases beside PyTorch
    python -m benchmarks.gpu.decode --peers eager --rounds 1  # a quick trial
    python -m benchmarks.gpu.decode --variants                # constants of this project's kernels
"""

import functools
import statistics
from dataclasses import replace

import numpy as np

from benchmarks.harness import ours
from benchmarks.harness.ours import seconds_per_step
from benchmarks.harness.processes import BenchmarkFailed, BenchmarkProcess, ProcessSpec
from benchmarks.harness.report import add_peer, check_gpus, paired_ratio, save_each
from benchmarks.harness.rounds import SEED, interleaved, measure_specs
from benchmarks.harness.script import benchmark
from gpt2core.errors import UserError
from gpt2core.presets import PRESETS
from stage2_cuda.runtime.triton_launch import first_line

OURS = "ours"
PEER_MODULE = "benchmarks.peers.torch_decode_cuda"
PEERS = {  # PyTorch's programs: their names for --peers and in the tables
    "graph": "torch compiled + each step a graph",
    "overhead": "torch compiled, reduce-overhead",
    "compiled": "torch compiled",
    "eager": "torch eager",
}
# name: (preset, sequences, prompt tokens, new tokens, precisions). "paper" is the paper's inference: its prompt fills
# the block, so from the second token on each token recomputes a window of the last 256 tokens.
CASES = {
    "one": ("gpt2", 1, 256, 256, ["bf16"]),
    "eight": ("gpt2", 8, 256, 256, ["bf16"]),
    "many": ("gpt2", 32, 256, 256, ["bf16"]),
    "xl": ("gpt2-xl", 1, 256, 128, ["bf16"]),
    "paper": ("paper", 1, 256, 30, ["fp32", "bf16"]),
}
# The options of PyTorch's program (peers/torch_decode_cuda.py) with the values to time; the first values are where the
# search begins.
CACHED_SEARCH = {"products": ["library", "templates"], "attention": ["sdpa", "matmul"], "cut": [128, 0]}
ONE_SEQUENCE_SEARCH = {
    "products": ["library", "sums", "templates"],
    "attention": ["sdpa", "matmul", "sums"],
    "cut": [128, 0],
}
WINDOW_SEARCH = {"attention": ["sdpa", "matmul"], "products": ["library", "templates"]}
SEARCH_ROUNDS, SEARCH_NEW = 3, 128  # new tokens: the first ones, for which few lengths of the cache are compiled
SEARCH_LAYERS = 6  # of a search: layers are equal, and many take long to compile
VARIANT_STEPS = 200  # in each timing of --variants
EAGER = {"attention": "sdpa", "products": "library"}  # the other values are fast only if they are compiled
# The values of DecodeTiling's fields that --variants times, for one sequence and for several.
ONE_SEQUENCE = {
    "pdl": [False, True],
    "split_k": [2, 3, 4, 6],
    "split_block_n": [32, 64, 128],
    "block_keys": [32, 64],
    "block_n": [8, 16, 32, 64],
    "block_vocab": [4, 8, 16, 32],
    "elements_per_thread": [64, 128, 256],
}
SEVERAL_SEQUENCES = {
    "pdl": [False, True],
    "block_n": [16, 32, 64],
    "block_k": [64, 128, 256],
    "stages": [3, 4, 7],
    "split_k": [2, 4, 6, 8, 12],
    "split_block_n": [32, 64, 128],
    "block_keys": [64, 128, 256],
    "block_vocab": [64, 128, 256],
}


def prepare(module, preset, batch, precision, layers=None, **options):
    """Called in each process. Return `run_round(prompt, new)`, which times one greedy continuation of random tokens.

    The first round is a cold start, because it builds the CudaGenerator of the module and compiles. run_round() returns
    the generated "ids" and seconds: "first" until the first new token, "total" for all new tokens, "token" for each
    token after the first. layers: those of the model (default: all). Further arguments are options of CudaGenerator; if
    they fail, it returns the "error".
    """
    config = replace(PRESETS[preset], n_layer=layers or PRESETS[preset].n_layer)
    build = functools.cache(lambda **variant: module.CudaGenerator(config, batch, precision, **options, **variant))
    warm = set()  # prompt lengths and variants of earlier rounds

    def run_round(prompt, new, **variant):
        try:
            return timed(build(**variant), prompt, new, (prompt, *variant.items()))
        except Exception as error:
            if not variant:
                raise
            return {"error": first_line(error)}

    def timed(generate, prompt, new, key):
        prompts = np.random.default_rng(SEED).integers(0, config.vocab_size, (batch, prompt))
        ids, first, total = generate(prompts, new)
        if key not in warm:
            warm.add(key)
            generate(prompts, new)  # the second call captures the CUDA graph; it is not timed
        return {"ids": ids.tolist(), "first": first, "total": total, "token": (total - first) / (new - 1)}

    return run_round


def process_specs(args, sizes, variant):
    """Yield a ProcessSpec for each row of a table: this project's program, then PyTorch's in the order of --peers.

    variant: the result of the search, options of the compiled programs of PyTorch.
    """
    yield ProcessSpec(OURS, "benchmarks.harness.ours", args.threads, sizes)
    for kind in args.peers:
        options = {**sizes, "kind": kind, **variant, **(EAGER if kind == "eager" else {})}
        yield ProcessSpec(PEERS[kind], PEER_MODULE, args.threads, options)


def search(run, values_of, rounds, start=()):
    """Find the fastest value of one option after another; returns (variant, [each tried variant with its timing]).

    run(**variant) returns {"token": seconds} or {"error": text}; its first call compiles. values_of: {option: values}.
    start: the variant, {option: value}, where the search begins. The values of one option are timed in interleaved
    rounds, and the fastest is kept for the next options. A timing is "us_per_token", the median, or "error".
    """
    fastest, tried = dict(start), {}
    for option, values in values_of.items():
        variants = {str(value): fastest | {option: value} for value in values}
        errors = {name: run(**variant).get("error") for name, variant in variants.items()}
        timers = {name: functools.partial(run, **variants[name]) for name, error in errors.items() if not error}
        if not timers:
            raise UserError(f"no value of {option} works: {errors.popitem()[1]}")
        us = {}
        for name, answers in interleaved(timers, rounds).items():
            us[name] = 1e6 * statistics.median(each["token"] for each in answers)
        for name, variant in variants.items():
            timing = {"us_per_token": us[name]} if name in us else {"error": errors[name]}
            tried[str(variant)] = variant | timing
            print(", ".join(f"{key}: {value}" for key, value in tried[str(variant)].items()), flush=True)
        fastest = variants[min(us, key=us.get)]
    return fastest, list(tried.values())


def candidates_of(case):
    """The options of PyTorch's program for a case, with the values that a search times."""
    preset, batch, prompt, *_ = CASES[case]
    window = prompt == PRESETS[preset].block_size
    return WINDOW_SEARCH if window else ONE_SEQUENCE_SEARCH if batch == 1 else CACHED_SEARCH


def variant_of(options, candidates):
    """The variant {option: value} with these texts such as "cut=0", and the first value of each other candidate."""
    variant = {option: values[0] for option, values in candidates.items()}
    if len(dict(each.split("=") for each in options)) < len(options):
        raise UserError(f"--options {' '.join(options)}: give each option once")
    for option, value in (each.split("=") for each in options):
        if value not in map(str, candidates.get(option, ())):
            raise UserError(f"--options {option}={value}: this case has {candidates}: use one of these values")
        variant[option] = type(variant[option])(value)
    return variant


def measure(args, case, precision):
    """Measure one case in one precision; return one result for each program, with the seconds of each round.

    Raises BenchmarkFailed if this project's program does not generate the same tokens in every round.
    """
    preset, batch, prompt, new, _ = CASES[case]
    request, sizes = {"prompt": prompt, "new": new}, dict(preset=preset, batch=batch, precision=precision)
    variant, searched = {}, {}
    if set(args.peers) - {"eager"}:
        candidates = candidates_of(case)
        variant, tried = variant_of(args.options or (), candidates), []
        if not args.options:
            layers = min(PRESETS[preset].n_layer, SEARCH_LAYERS)
            spec = ProcessSpec("search", PEER_MODULE, args.threads, sizes | {"kind": "graph", "layers": layers})
            with BenchmarkProcess(spec, args.benchmark, args.timeout) as process:
                run = functools.partial(process.run_round, prompt=prompt, new=min(new, SEARCH_NEW))
                variant, tried = search(run, candidates, SEARCH_ROUNDS, variant)
            tried = [each | {"layers": layers} for each in tried]
        searched = {"tried": tried, "variant": described(variant)}
    specs = list(process_specs(args, sizes, variant))
    measured = measure_specs(specs, args, request, request)
    results = []
    for spec in specs:
        rounds = measured[spec.name]["rounds"]
        if differing := sum(each["ids"] != rounds[0]["ids"] for each in rounds):
            message = f"{spec.name}: {differing} of {len(rounds)} rounds gave other tokens than the first round"
            if spec.name == OURS:
                raise BenchmarkFailed(message)
            print(message)  # PyTorch does not guarantee equal tokens, so its time is still used
        results.append(
            {
                "name": spec.name,
                "case": case,
                **spec.options,
                **request,
                **(searched if spec.options.get("kind", "eager") != "eager" else {}),
                **{key: [each[key] for each in rounds] for key in ("first", "token", "total")},
                "cold": measured[spec.name]["warm_up"]["total"],
            }
        )
    return results


def summarise(results):
    """Add speed ratios to the results of one table: the time of each peer, divided by that of the result."""
    for result in results:
        result["times_as_fast"] = {peer["name"]: paired_ratio(peer["total"], result["total"]) for peer in results}
    add_peer(results[0], results[1:], results[0]["times_as_fast"], "token")


def described(variant):
    """A variant of PyTorch's program as text."""
    cut = f", cache cut to a multiple of {variant['cut']}" if variant.get("cut") else ""
    return f"attention: {variant['attention']}, products: {variant['products']}{cut}"


def time_constants(args, case):
    """Search for the fastest constants of this project's kernels; return one result for each tried variant."""
    preset, batch, prompt, _, precisions = CASES[case]
    config = PRESETS[preset]
    prompt = min(prompt, config.block_size // 2)  # the block does not become full, so every step uses the KV cache
    steps = min(VARIANT_STEPS, config.block_size - prompt - 8)
    generator = ours.CudaGenerator(config, batch, precisions[-1])
    prompts = np.random.default_rng(SEED).integers(0, config.vocab_size, (batch, prompt))

    @functools.lru_cache(maxsize=8)  # the values of one constant
    def decoder(**constants):
        return generator.decoder(batch, **constants)

    def run(**constants):
        try:
            return {"token": seconds_per_step(decoder(**constants), prompts, steps)}
        except Exception as error:  # the tile needs more registers or shared memory than the GPU has
            return {"error": first_line(error)}

    fastest, tried = search(run, ONE_SEQUENCE if batch == 1 else SEVERAL_SEQUENCES, args.rounds)
    print(f"{case}: the fastest values are {fastest}\n")
    return [{"case": case, **each} for each in tried]


VARIANT = [f"{name}={value}" for name, values in {**CACHED_SEARCH, **ONE_SEQUENCE_SEARCH}.items() for value in values]
DEFAULTS = ["graph", "overhead", "eager"]
TITLES = "; ".join(f"{name}: {title}" for name, title in PEERS.items())


@benchmark(
    "gpu-decode",
    common=dict(threads=4, rounds=7, timeout=500),
    cases=dict(choices=CASES, nargs="+", default=list(CASES), help="a table for each (default all)"),
    peers=dict(choices=PEERS, nargs="*", default=DEFAULTS, help=f"{TITLES} (default {' '.join(DEFAULTS)})"),
    options=dict(choices=VARIANT, nargs="+", help="the variant of PyTorch's compiled programs, instead of a search"),
    variants=dict(
        action="store_true",
        help="time constants of this project's kernels, instead of PyTorch's programs",
        save_as="decode_variants",
    ),
)
def main(args):
    if args.options and (args.variants or set(args.peers) <= {"eager"}):
        raise UserError("--options needs a compiled program of PyTorch: add one to --peers, and leave out --variants")
    for case in args.cases:
        variant_of(args.options or (), candidates_of(case))  # raises an error before the first measurement
    check_gpus(1)
    if args.variants:
        save_each(args, (time_constants(args, case) for case in args.cases))
        return
    for case in args.cases:
        for precision in CASES[case][-1]:
            results = measure(args, case, precision)
            summarise(results)
            yield results
