"""What do rotary positions cost, compared with learned ones: a training step, a generated token, a long context?

After the end of the block, the cache of rotary positions slides. With --device cpu, only tokens are measured.

python -m benchmarks.gpu.positions                              # on a GPU
python -m benchmarks.gpu.positions --device cpu --preset paper  # tokens on a CPU
"""

import statistics
from dataclasses import replace

import numpy as np

from benchmarks.gpu.timing import LEAD_IN, step_timer, time_calls
from benchmarks.harness.ours import CudaSteps
from benchmarks.harness.report import paired_ratio
from benchmarks.harness.rounds import SEED, interleaved, random_batch
from benchmarks.harness.script import benchmark
from gpt2core.architecture import POSITIONS
from gpt2core.errors import UserError
from gpt2core.model import initial_parameters
from gpt2core.parallel.tensor.loaded_model import load_inference_model
from gpt2core.presets import PRESETS
from gpt2core.sampler import generate

TOKENS = 64  # timed tokens before the end of the block, and after it


def token_function(config, backend):
    """Return run_round(): the median seconds of a token before and after the end of the block, as a list."""
    model, decoders = load_inference_model(config, dict(initial_parameters(config, SEED)), backend), {}
    prompt = np.random.default_rng(SEED).integers(0, config.vocab_size, config.block_size - TOKENS - LEAD_IN)

    def run_round():
        tokens = generate(model, prompt, 2 * (TOKENS + LEAD_IN), decoders=decoders)
        halves = [range(TOKENS + LEAD_IN)] * 2  # the first token of the second half is the first after the block
        return [statistics.median(time_calls(lambda _: next(tokens), half)) for half in halves]

    return run_round


def long_context(preset, length, steps):
    """The result of training with one sequence of `length` tokens, the same in each step."""
    config = replace(PRESETS[preset], positions="rotary", block_size=length)
    program, rng = CudaSteps(config, 1, length, recompute="block"), np.random.default_rng(SEED)
    batch = random_batch(rng, config.vocab_size, 1, length)
    losses = []
    seconds = time_calls(lambda _: losses.append(program(*batch)), range(LEAD_IN + steps))
    return {
        "tokens": length,
        "seconds": [seconds],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **program.memory(),
    }


def measure_steps(configs, args):
    functions = {
        name: step_timer(CudaSteps(each, args.batch_size, each.block_size), each, args.batch_size, args.steps_per_round)
        for name, each in configs.items()
    }
    seconds = interleaved(functions, args.rounds)
    times = paired_ratio(seconds["rotary"], seconds["learned"])
    print(f"a step with rotary positions takes {times['median']:.3f} times as long as with learned ones")
    return {"seconds": seconds, "rotary_times": times}


def measure_tokens(configs, backend, args):
    functions, results = {name: token_function(each, backend) for name, each in configs.items()}, {}
    for name, rounds in interleaved(functions, args.rounds).items():
        before, after = zip(*rounds, strict=True)
        results[name] = {"seconds": {"before": before, "after": after}, "after_times": paired_ratio(after, before)}
    return results


@benchmark(
    "gpu-positions",
    common=dict(preset="gpt2", device="cuda", rounds=7, steps_per_round=10, batch_size=64),
    contexts=dict(type=int, nargs="+", default=[1024, 8192, 32768], help="lengths of a training sequence"),
)
def main(args):
    config = PRESETS[args.preset]
    if config.block_size <= TOKENS + LEAD_IN:
        shortest = TOKENS + LEAD_IN + 1
        size = f"its block of {config.block_size} tokens is shorter than {shortest}"
        raise UserError(f"--preset {args.preset}: {size}: use a larger model")
    configs = {positions: replace(config, positions=positions) for positions in POSITIONS}
    results = {"preset": args.preset, "steps": None, "contexts": []}
    if args.device == "cpu":
        from stage0_serial.numpy_backend import NumpyBackend

        backend = NumpyBackend()
    else:
        from stage2_cuda.cuda_backend import CudaBackend

        results["steps"] = measure_steps(configs, args)
        results["contexts"] = [long_context(args.preset, length, args.steps_per_round) for length in args.contexts]
        backend = CudaBackend("bf16")
    results["tokens"] = measure_tokens(configs, backend, args)
    return results
