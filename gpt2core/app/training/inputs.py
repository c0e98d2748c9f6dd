"""What the root reads before training: the checkpoint, the tokenizer, the corpus and the value of every setting."""

import math
from dataclasses import dataclass, replace

import numpy as np

from gpt2core.app.checkpoint_tokenizer import check_tokenizer, check_vocabulary
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.checkpoints.files import Checkpoint
from gpt2core.app.checkpoints.out_flag import check_names, check_out_directory
from gpt2core.app.corpus import Corpus, check_validation, read_texts, split_corpus
from gpt2core.app.resume import Progress, edited_notes, find_data, read_progress
from gpt2core.app.settings.final_values import (
    default_tokenizer,
    model_config,
    preset_notes,
    resolve_flags,
    resolve_rank_flags,
    schedule_notes,
)
from gpt2core.app.settings.run_config import RunConfig
from gpt2core.app.shipped import check_downloaded
from gpt2core.text.token_files import TokenFiles, is_tokenized
from gpt2core.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Inputs:
    """The files and settings that the root reads before training."""

    config: RunConfig
    notes: list[str]  # lines to print
    source: Checkpoint | None  # the checkpoint that the run loads
    progress: Progress | None  # the progress of a resumed run
    tokenizer: Tokenizer
    tokens: np.ndarray | TokenFiles  # token ids for training
    validation: np.ndarray | TokenFiles | None  # token ids of the text for validation


def read_inputs(world, args, transport, deterministic):
    """Read the Inputs and determine the value of every flag; only the root calls it.

    transport: the result of world.use_transport(); deterministic: the stage's default.
    """
    check_out_directory(args)
    check_names(args)
    source = None
    check_downloaded(args.init_from)
    if path := args.resume or args.init_from:
        source = load_checkpoint(path, with_optimizer=path is args.resume, accept_edited=args.accept_edited)
    saved, data_notes = find_data(source, args) if args.resume else ({}, [])
    settings, notes = resolve_flags(args, saved, deterministic)
    check_validation(settings)
    settings, rank_notes = resolve_rank_flags(replace(settings, transport=transport), world)
    tokens, validation, tokenizer = read_texts(settings, source, default_tokenizer(settings))
    corpus = Corpus(*split_corpus(tokens, validation, settings.val_fraction), tokenizer)
    if source:
        check_tokenizer(tokenizer, source, settings.data if is_tokenized(settings.data) else None)
        check_vocabulary(tokenizer, source.config.vocab_size, f"the checkpoint in {source.path}")
    model = model_config(settings, source and source.config, tokenizer.vocab_size)
    settings = replace(settings, seq_len=settings.seq_len or model.block_size)
    if settings.epochs is not None:
        settings = replace(settings, steps=total_steps(settings, len(corpus.tokens)), epochs=None)
    config = RunConfig(model=model, **vars(settings))
    progress = read_progress(source, corpus.fingerprint) if args.resume else None
    notes = [*edited_notes(source), *data_notes, *preset_notes(args, model), *notes, *rank_notes]
    notes += schedule_notes(config, saved, progress)
    return Inputs(config, notes, source, progress, tokenizer, tokens, validation)


def total_steps(settings, count):
    """The number of steps in which the settings' number of epochs of `count` training tokens are read."""
    windows = settings.epochs * math.ceil(count / settings.seq_len)
    return math.ceil(windows / settings.batch_size)
