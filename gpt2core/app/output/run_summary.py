"""What a training run prints besides its steps: the header, notes about threads and time, and how the run ended."""

import signal

from gpt2core.app.output.terminal import training_width, wrapped
from gpt2core.app.settings.definitions import with_flags
from gpt2core.app.settings.final_values import nothing_left, rank_flags
from gpt2core.architecture import parameter_count
from gpt2core.errors import counted
from gpt2core.parallel.pipeline.placement import describe_ranks
from gpt2core.parallel.sharded.units import memory


def run_header(config, trainer, corpus):
    """The header of a run: the model, the data, and how threads and ranks divide the work. corpus: a Corpus."""
    model, world, data, threads = trainer.config, trainer.world, trainer.mesh.data, trainer.pool.size
    layers, heads = counted(model.n_layer, "layer"), counted(model.n_head, "head")
    library = trainer.backend.runtime.library
    lines = [
        f"GPT-2 {config.init_from or config.preset}: {parameter_count(model):,} parameters, {layers}, {heads}, "
        f"{model.n_embd} wide, vocabulary {model.vocab_size}",
        f"{len(corpus.tokens):,} tokens of {config.data.name}, {config.batch_size} x {config.seq_len} per step in "
        f"{counted(trainer.micro_batches, 'micro-batch')} on {counted(threads, 'thread')}, "
        f"{config.precision} on {trainer.backend.name}" + f" with {library}" * bool(library),
    ]
    if not world.one_process:
        lines.append(
            f"{counted(world.size, 'rank')}: {data.size} data x {trainer.mesh.tensor.size} tensor "
            + f"x {config.pp} pipeline " * (config.pp > 1)
            + f"parallel, {rank_flags(config)}"
        )
    if config.pp > 1:
        lines.append(describe_ranks(model, config.pp, config.parallel.chunks))
    if trainer.bucket_size:
        lines.append(with_flags(str(trainer.bucket_size)))
    if config.zero:
        lines.append(describe_zero(config.zero, trainer))
    if not config.save:
        lines.append("nothing will be saved")
    return "\n".join(lines)


def describe_zero(zero, trainer):
    """A line: what a rank has in memory of the arrays that ZeRO-1, 2 or 3 divides, and what it would have without."""
    whole = trainer.arena.size * trainer.parameters.itemsize / 2**20  # MiB of all parameters
    if zero == 1:  # the two moments
        text = f"optimizer state: {trainer.optimizer.nbytes / 2**20:.2f} MiB per rank"
        return f"{text}; {2 * whole:.2f} MiB without ZeRO-1"
    shards, parameters, gradients = (
        count / 2**20 for count in memory(trainer.accumulator.work, zero, trainer.pool.size)
    )
    parts = trainer.optimizer.parameters, trainer.optimizer.compute_copy
    whole *= 3 + sum(array.itemsize for array in parts if array is not None) / trainer.parameters.itemsize
    return (
        f"memory per rank: {shards:.2f} MiB for shards of parameters, gradients and optimizer state, up to "
        f"{parameters:.2f} MiB for whole parameters and {gradients:.2f} MiB for whole gradients; {whole:.2f} MiB "
        f"without ZeRO-{zero}"
    )


def unused_threads(threads, config, trainer):
    """A list with one note if the Trainer uses fewer than `threads` threads, because the batch is small; else []."""
    if trainer.pool.size >= threads:
        return []
    return [
        f"note: a batch of {config.batch_size} in {counted(trainer.micro_batches, 'micro-batch')} keeps no more than "
        f"{trainer.pool.size} of {threads} threads busy"
    ]


def time_left(seconds, steps):
    """A list with one note: the time of `steps` more steps of `seconds` each; [] if this is less than 10 s."""
    left = seconds * steps
    return [f"about {duration(left)} for {counted(steps, 'more step')}"] if left >= 10 else []


def report_end(config, trainer, first_step, seconds, stopped_by, command):
    """Print how the run ended.

    first_step: the number of the first step of this process. seconds: the time of the steps of this process.
    stopped_by: the number of the signal that stopped the run, or None. command: the command line that resumes the run.
    """
    out = config.out
    if first_step >= config.steps:
        print(wrapped(nothing_left(config, first_step), training_width()))
    if stopped_by and trainer.steps < config.steps:
        done = f"{signal_reason(stopped_by)} after {trainer.steps} of {counted(config.steps, 'step')}"
        advice = f"continue with\n  {command}" if out else "nothing was saved"
        print(f"{done}: {advice}")
        return
    total = f", {trainer.steps} in total" if first_step else ""
    saved = f", saved in {out}" if out else " (nothing was saved)"
    print(f"trained {counted(trainer.steps - first_step, 'step')} in {duration(seconds)}{total}{saved}")
    if trainer.loss_scale.value is not None:
        factor, repetitions = trainer.loss_scale.value, trainer.loss_scale.skipped
        print(f"loss scale {factor:g}; repetitions of steps because of overflow: {repetitions}")
    if peak := trainer.backend.runtime.peak_memory():
        print(f"largest amount of device memory used: {peak / 2**30:.2f} GiB")


def signal_reason(number):
    """Why a run ended early, as text. number: the number of the signal that stopped the run."""
    name = signal.Signals(number).name
    return "interrupted" if name == "SIGINT" else f"stopped by {name}"


def duration(seconds):
    """A number of seconds as text: in seconds below 2 minutes, in minutes below 2 hours, else in hours and minutes."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
