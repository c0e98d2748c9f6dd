"""--dry-run: check the flags as training does, and print what a step of exactly this configuration needs and sends."""

import os
from dataclasses import replace

from gpt2core.app.backend_setup import step_sizes, usable_cores
from gpt2core.app.checkpoints.out_flag import names_inside
from gpt2core.app.corpus import share_corpus
from gpt2core.app.output.run_log import rows_of_older_run
from gpt2core.app.output.run_summary import run_header
from gpt2core.app.output.terminal import training_width, wrapped
from gpt2core.app.planning.flops import forward_flops, step_flops
from gpt2core.app.planning.layout import Layout, own_chunks
from gpt2core.app.planning.memory import device_terms, host_terms
from gpt2core.app.planning.traffic import by_collective, bytes_sent, traffic
from gpt2core.app.planning.without_memory import planned
from gpt2core.app.settings.definitions import TrainSettings
from gpt2core.app.settings.setting_fields import names_of
from gpt2core.app.stage_checks import check_one_process, check_rank_flags
from gpt2core.app.training.inputs import read_inputs
from gpt2core.app.training.setup import make_data_and_schedule, make_trainer
from gpt2core.architecture import parameter_count
from gpt2core.errors import counted
from gpt2core.parallel.all_or_raise import all_or_raise, on_root
from gpt2core.parallel.config import BUCKET_MB
from gpt2core.parallel.pipeline.simulator import simulate

MIB = 1 << 20


def dry_run(stage, world, args, cores):
    """Print the plan of a training command; returns the exit code. The arguments are those of train_command().

    The trainer is made as for training, with arrays that have no memory; so a wrong option raises the same error.
    """
    check_one_process(stage, world)
    check_rank_flags(stage, world, args)
    transport = all_or_raise(world, lambda: world.plan_transport(args.transport))
    inputs = on_root(world, lambda: read_inputs(world, args, transport, stage.backend.deterministic))
    notes = inputs.notes if inputs else []
    config, tokenizer = world.broadcast_object(inputs and (inputs.config, inputs.tokenizer))
    if config.bucket_mb is None:
        notes.append(f"note: the size of the buckets is measured when training starts: {BUCKET_MB:g} MB are assumed")
        config = replace(config, bucket_mb=BUCKET_MB)
    cores = usable_cores(config, cores)
    all_or_raise(world, lambda: world.use_collectives(config.collectives))
    corpus = share_corpus(world, config, inputs and (inputs.tokens, inputs.validation), tokenizer)
    trainer = all_or_raise(world, lambda: make_trainer(planned(stage), world, config, cores, None))
    all_or_raise(world, lambda: make_data_and_schedule(config, corpus, trainer.mesh.data))
    on_root(world, lambda: check_files(config))
    if world.is_root:
        print(wrapped(run_header(config, trainer, corpus), training_width()))
        for note in notes:
            print(wrapped(note, training_width()))
        print("\n".join(plan_lines(config, trainer)))
    return 0


def check_files(config):
    """Raise ConfigError if training may not write a file; remove what this check creates.

    A file in a directory that only training creates is not checked.
    """
    written = names_of(TrainSettings, written=True)
    later = config.out and not config.out.exists()
    inside = [name for name in written if later and (path := getattr(config, name)) and names_inside(path, config.out)]
    config = replace(config, **dict.fromkeys(inside))
    new = [path for name in written if (path := getattr(config, name)) and not os.path.lexists(path)]
    try:
        rows_of_older_run(config)
    finally:
        for path in new:
            path.unlink(missing_ok=True)


def layout_of(trainer):
    """The Layout of a trainer."""
    return Layout(
        trainer.config, trainer.parallel, trainer.batch_size, trainer.seq_len, trainer.micro_batches,
        trainer.mesh.data.size, trainer.accumulator.merged, trainer.pool.size, trainer.backend.compute_dtype.itemsize,
    )  # fmt: skip


def plan_lines(config, trainer):
    """The lines of the plan of a step."""
    layout, backend = layout_of(trainer), trainer.backend
    needed, computed = step_flops(layout)
    again = f", {computed:.4g} with the blocks that are computed again" * (computed > needed)
    yield "dry run: nothing is trained or written"
    yield f"parameters: {parameter_count(layout.config):,}"
    yield f"FLOPs of a step, over all ranks: {needed:.4g}{again}"
    places = layout.places()
    if backend.on_host:
        memory = [host_terms(layout, place) for place in places]
    else:
        in_order = step_sizes(config, layout.micro_batches, layout.replicas)[-1]
        terms = device_terms(layout, config.precision, in_order)
        memory = [terms[place.pipeline] for place in places]
    largest = max(range(len(memory)), key=lambda rank: sum(memory[rank].values()))
    yield from memory_lines(memory[largest], largest)
    yield from traffic_lines(layout, trainer.world.sent, places)
    yield from pipeline_lines(layout)


def memory_lines(terms, rank):
    """A table of the memory of the rank that needs most."""
    yield f"memory of rank {rank}, which needs most: {sum(terms.values()) / MIB:,.2f} MiB"
    for term, count in terms.items():
        if count:
            yield f"  {term:44} {count / MIB:12,.2f} MiB"


def traffic_lines(layout, sent, places):
    """A table of what the rank that sends most sends in a step, by purpose and collective."""
    calls = [traffic(layout, place) for place in places]
    if not any(calls):
        return
    totals = [bytes_sent(layout, *each, sent) for each in zip(places, calls, strict=True)]
    most = max(range(layout.ranks), key=totals.__getitem__)
    yield f"sent by rank 0 in a step: {totals[0]:,} bytes; rank {most} sends most: {totals[most]:,} bytes"
    yield f"  {'what rank ' + str(most) + ' sends':28} {'collective':16} {'calls':>8} {'bytes':>16}"
    for purpose, name, count, size in by_collective(layout, places[most], calls[most], sent):
        yield f"  {purpose:28} {name:16} {count:8,} {size:16,}"


def pipeline_lines(layout):
    """Which rank of the pipeline has which layers, and the simulated bubble; nothing without a pipeline."""
    parallel = layout.parallel
    if parallel.pp == 1:
        return
    seconds = action_flops(layout)
    timeline = simulate(layout.schedule(), lambda kind, c: seconds[kind, c])
    for rank, peak in enumerate(timeline.peaks):
        units = [unit for chunk in own_chunks(layout, rank) for unit in chunk]
        blocks = counted(sum(unit.startswith("h.") for unit in units), "layer")
        ends = [unit for unit in ("embedding", "head") if unit in units]
        yield f"  pipeline rank {rank}: {', '.join([blocks, *ends])}; activations of up to {peak:g} micro-batches"
    text = "simulated, with the times of actions in proportion to their FLOPs and without messages"
    yield f"bubble of {parallel.pp_schedule}: {timeline.bubble:.1%} ({text})"


def action_flops(layout):
    """{(kind, chunk): the operations per token of an action of the pipeline}."""
    forward, parallel = forward_flops(layout.config, layout.seq_len), layout.parallel
    flops = {}
    for rank in range(parallel.pp):
        for number, units in enumerate(own_chunks(layout, rank)):
            chunk = rank + parallel.pp * number
            count = sum(forward[unit] for unit in units)
            flops |= {("F", chunk): count, ("B", chunk): count, ("W", chunk): count, ("E", chunk): 0.0}
    return flops
