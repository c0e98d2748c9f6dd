"""Models and training recipes by name, and the default of every training flag."""

from pathlib import Path

from gpt2core.model import GPT2Config

DATA = Path(__file__).resolve().parents[2] / "data"
CORPUS, WEIGHTS = DATA / "dummy.txt", DATA / "gpt2-paper"
BOOK, BOOK_WEIGHTS = DATA / "moby_dick.txt", DATA / "gpt2-book"
SHIPPED = {WEIGHTS: CORPUS, BOOK_WEIGHTS: BOOK}  # {weights: the corpus that they were trained on}
OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's weights, which are not shipped

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

# The paper's Adam, and GPT-2's own recipe for the large presets. `data` is the default corpus if it is not CORPUS.
PAPER = dict(
    steps=50, batch_size=16, lr=3e-4, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0, beta1=0.9, beta2=0.999
)
LARGE = dict(
    steps=1000, batch_size=8, lr=6e-4, schedule="cosine", warmup=100, weight_decay=0.1, clip=1.0, beta1=0.9, beta2=0.95
)
RECIPES = {name: LARGE for name in PRESETS} | {
    "paper": PAPER,
    "tiny": PAPER | dict(steps=60, lr=3e-3),
    "nano": PAPER | dict(steps=20, batch_size=4, lr=3e-3),
    "book": LARGE | dict(steps=1200, batch_size=16, lr=3e-3, min_lr=1e-4, data=str(BOOK), shuffle=True),
}
TOKENIZERS = {"book": BOOK_WEIGHTS / "tokenizer.json"}  # {preset: its default --tokenizer}; of the others: word
COMMON = dict(preset="paper", seed=0, deterministic=True, precision="fp32", rounding="nearest", eps=1e-8, shuffle=False)
COMMON |= dict(eval_every=0, checkpoint_every=0, keep=2, log_every=1)
# The flags that a resumed run takes from the checkpoint if the command line omits them, with their types.
RESUMED = {name: type(value) for name, value in (PAPER | COMMON).items()} | dict(
    min_lr=float, seq_len=int, micro_batches=int, data=str, val_data=str, val_fraction=float
)
RENAMED = {"micro_shards": "micro_batches"}  # {name in older checkpoints: present name}
# How ranks divide the work. A checkpoint does not contain these flags: any number of ranks can resume it.
RANK_FLAGS = dict(dp="flat", bucket_mb=None, compress="none", zero=None, zero_gather="end", tp=1)
RANK_FLAGS |= dict(collectives=None, transport=None, verify_every=0, local_shuffle=False)
MODES = ("replicate", "batch", "tensor")  # how ranks divide inference
SHAPE = ("n_layer", "n_head", "n_embd", "block_size")  # flags that set the size of the model
