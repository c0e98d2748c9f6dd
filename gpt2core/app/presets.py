"""Models and training recipes by name, and the default of every training flag."""

from pathlib import Path

from gpt2core.model import GPT2Config

# In a clone, data/ is beside the package. A plain `pip install .` copies it into the package (pyproject.toml).
INSTALLED = Path(__file__).resolve().parents[1] / "shipped"
DATA = INSTALLED if INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "data"
CORPUS, WEIGHTS = DATA / "dummy.txt", DATA / "gpt2-paper"
BOOK, BOOK_WEIGHTS = DATA / "moby_dick.txt", DATA / "gpt2-book"
SHIPPED = {WEIGHTS: CORPUS, BOOK_WEIGHTS: BOOK}  # {weights: the corpus that they were trained on}
OPENAI_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # directories of OpenAI's weights; they are not shipped

# Positional arguments: vocab_size, block_size, n_layer, n_head, n_embd. The default GPT2Config() is GPT-2 124M.
# A new model gets the vocabulary size of its tokenizer instead of the one in this table.
PRESETS = {
    "nano": GPT2Config(172, 16, 2, 2, 32, tied=False),
    "tiny": GPT2Config(172, 64, 2, 4, 64, tied=False),
    "paper": GPT2Config(172, 256, 6, 6, 384, tied=False),
    "book": GPT2Config(2048, 256, 4, 6, 192),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
    "small": GPT2Config(10000),
    "medium": GPT2Config(10000, n_layer=24, n_head=16, n_embd=1024),
    "large": GPT2Config(10000, n_layer=36, n_head=20, n_embd=1280),
    "xl": GPT2Config(10000, n_layer=48, n_head=25, n_embd=1600),
    "2.7B": GPT2Config(10000, n_layer=32, n_head=32, n_embd=2560),
}

# A recipe has the default values of the training flags. Its field `data` is the default corpus; a recipe without this
# field uses CORPUS. PAPER_RECIPE is that of "Distributed GPT-2", the paper that this project follows. GPT3_RECIPE has
# the optimizer settings and peak learning rate of GPT-3 125M (Brown et al. 2020), because the paper on GPT-2 does not
# publish them; its numbers of steps, sequences and warm-up steps are small values chosen for this project.
PAPER_RECIPE = dict(
    steps=50, batch_size=16, lr=3e-4, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0, beta1=0.9, beta2=0.999
)
GPT3_RECIPE = dict(
    steps=1000, batch_size=8, lr=6e-4, schedule="cosine", warmup=100, weight_decay=0.1, clip=1.0, beta1=0.9, beta2=0.95
)
RECIPES = {name: GPT3_RECIPE for name in PRESETS} | {
    "paper": PAPER_RECIPE,
    "tiny": PAPER_RECIPE | dict(steps=60, lr=3e-3),
    "nano": PAPER_RECIPE | dict(steps=20, batch_size=4, lr=3e-3),
    "book": GPT3_RECIPE | dict(steps=1200, batch_size=16, lr=3e-3, min_lr=1e-4, data=str(BOOK), shuffle=True),
}
TOKENIZERS = {"book": BOOK_WEIGHTS / "tokenizer.json"}  # {preset: its default --tokenizer}; other presets: word
# Defaults of other flags, which a recipe can replace. resolve_flags() replaces `deterministic` by the stage's default.
COMMON = dict(preset="paper", seed=0, deterministic=True, precision="fp32", rounding="nearest", eps=1e-8, shuffle=False)
COMMON |= dict(eval_every=0, checkpoint_every=0, keep=2, log_every=1)
# {flag: its type} for the flags that a checkpoint contains. If a resumed run omits such a flag on the command line, the
# value in the checkpoint is used.
SAVED_TYPES = {name: type(value) for name, value in (PAPER_RECIPE | COMMON).items()} | dict(
    min_lr=float, seq_len=int, micro_batches=int, data=str, val_data=str, val_fraction=float
)
FORMER_NAMES = {"micro_shards": "micro_batches"}  # {name of a flag in older checkpoints: its present name}
SCHEDULE_FLAGS = ("schedule", "lr", "min_lr", "warmup", "steps")  # the fields of Schedule, in its order
# The flags about many ranks, with their defaults. A checkpoint does not contain them, so that any number of ranks can
# resume it. A default None is replaced later: for --transport by world.use_transport(), for the other flags by
# resolve_rank_flags() in run_config.py.
RANK_FLAGS = dict(dp="flat", bucket_mb=None, compress="none", zero=None, zero_gather="end", tp=1)
RANK_FLAGS |= dict(collectives=None, transport=None, verify_every=0, local_shuffle=False)
MODES = ("replicate", "batch", "tensor")  # values of --mode: how the ranks divide the work of inference
SIZE_FLAGS = ("n_layer", "n_head", "n_embd", "block_size")  # flags that set the size of the model
