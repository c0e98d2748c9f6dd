"""The files that the misuses of tests/app/misuse name: {dir} in a table is a directory filled by `fill`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpt2core.text.token_file import write_token_file
from gpt2core.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "empty.txt": b"",
    "blank.txt": b"\n",
    "short.txt": b"only four short words",
    "latin1.txt": "café au lait".encode("latin-1"),
    "image.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "utf16.txt": "the model".encode("utf-16"),
    "strange.txt": b"the model reads one aardvark",
    "spaces.txt": b"the  model reads",
    "lines.txt": b"the model\n\nreads one\n",
    "second.txt": b"the model\nreads one aardvark\n",
    "cut.txt": "a café".encode()[:-1],
    "broken.json": b'{"model": ',
    "other.json": b'{"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}}',
    "none.json": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
    "list.json": b"[]",
    "file": b"another program's file",
    "odd.bin": bytes(33),
    "far.bin": bytes(64) + b"\x00\x01",
    "noise.bin": b"\x93GPT2TOK" + bytes(range(60)),
}


# Byte-level tokenizers with one change: {name of the .json file: function that changes the parsed file}.
TOKENIZERS = {
    "lowercase": lambda values: values.update(normalizer={"type": "Lowercase"}),
    "dropout": lambda values: values["model"].update(dropout=0.5),
    "removed": lambda values: values.update(pre_tokenizer={"type": "Whitespace"}),
    "huge": lambda values: values["model"]["vocab"].update(many=4_000_000_000),
}
# Copies of the run with one changed file: {directory: (file, function of its content)}.
CHANGED = {
    "bit": ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "nan": ("model.safetensors", lambda content: content[:-4] + b"\0\0\xc0\x7f"),
    "truncated": ("model.safetensors", lambda content: content[: len(content) // 2]),
    "heads": ("config.json", lambda content: content.replace(b'"n_head": 2', b'"n_head": 4')),
    "words": (
        "tokenizer.json",
        lambda content: content.replace(b": 7,", b": 70,").replace(b": 8,", b": 7,").replace(b": 70,", b": 8,"),
    ),
    "position": ("state.json", lambda content: content.replace(b'"position": ', b'"position": 99999999')),
}


def fill(home, corpus):
    """Write FILES, other corpora, broken token files, an empty directory and a run of two checkpoints into `home`."""
    for name, content in FILES.items():
        (home / name).write_bytes(content)
    (home / "empty").mkdir()
    shutil.copy(corpus, home / "corpus.txt")
    text = corpus.read_text(encoding="utf-8")
    (home / "other.txt").write_text(text[::-1], encoding="utf-8")
    (home / "less.txt").write_text(text[: len(text) // 2], encoding="utf-8")
    for name in ("tokens", "cut", "foreign"):
        (home / name).mkdir()
        tokenizer = Tokenizer.byte_level()
        write_token_file(home / name / "tokens.bin", [tokenizer.encode(text)], tokenizer)
        tokenizer.save(home / name / "tokenizer.json")
    os.truncate(home / "cut" / "tokens.bin", 999)
    for path in (home / "foreign" / "tokenizer.json", home / "two.json"):
        Tokenizer.word_level("another vocabulary").save(path)
    flags = ["--preset", "nano", "--data", home / "corpus.txt", "--steps", 4, "--checkpoint-every", 2, "--sample", 0]
    outputs = ["--out", home / "run", "--log", home / "run.jsonl"]
    words = [sys.executable, "-m", "stage0_serial.train_gpt2", *flags, *outputs]
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tokenizer = json.loads(Tokenizer.byte_level().to_bytes())
    for name, change in TOKENIZERS.items():
        changed = json.loads(json.dumps(tokenizer))
        change(changed)
        (home / f"{name}.json").write_text(json.dumps(changed))
    for name, (file, change) in CHANGED.items():
        path = shutil.copytree(home / "run", home / name, symlinks=True) / "latest" / file
        path.write_bytes(change(path.read_bytes()))
    bare = shutil.ignore_patterns("tokenizer.json", "state.json")
    shutil.copytree(home / "run" / "latest", home / "bare", ignore=bare)
    for name in ("state.json", "optimizer.safetensors"):
        (home / "nan" / "latest" / name).unlink()  # weights of another program have no hashes
    return home


def snapshot(path, without=()):
    """{relative path: content} of everything below `path`, except the names `without`.

    The content of a link is its target; a directory, a pipe and a socket have none.
    """

    def content(file):
        return os.readlink(file) if file.is_symlink() else file.is_file() and file.read_bytes()

    return {str(file.relative_to(path)): content(file) for file in Path(path).rglob("*") if file.name not in without}
