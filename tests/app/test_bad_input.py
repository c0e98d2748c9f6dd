"""Every user mistake is one line on standard error that names it, exit code 2, and changes no file."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt2core.app import safetensors_file
from gpt2core.app.checkpoint_directory import load_checkpoint
from gpt2core.app.run_log import RunLog
from gpt2core.app.safetensors_file import read_safetensors, write_safetensors
from gpt2core.errors import ConfigError
from gpt2core.parallel.steps_in_flight import Step
from gpt2core.text.token_file import write_token_file
from gpt2core.text.tokenizer import Tokenizer
from tests.support.checkpoints import edit_json

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "stage0_serial"
FULL = Path("/dev/full")  # every write fails with "No space left on device"

# The files in {dir}, a fresh directory for each row of the tables below.
FILES = {
    "empty.txt": b"",
    "blank.txt": b"\n",
    "short.txt": b"only four short words",
    "latin1.txt": "café au lait".encode("latin-1"),
    "strange.txt": b"the model reads one aardvark",
    "cut.txt": "a café".encode()[:-1],
    "broken.json": b'{"model": ',
    "other.json": b'{"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}}',
    "none.json": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
    "list.json": b"[]",
    "file": b"another program's file",
    "noise.bin": b"\x93GPT2TOK" + bytes(range(60)),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory, corpus):
    """A directory with all FILES, broken token files, an empty directory, and a trained run with two checkpoints."""
    home = tmp_path_factory.mktemp("home")
    for name, content in FILES.items():
        (home / name).write_bytes(content)
    (home / "empty").mkdir()
    shutil.copy(corpus, home / "corpus.txt")
    (home / "other.txt").write_text(corpus.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    text = corpus.read_text(encoding="utf-8")
    (home / "less.txt").write_text(text[: len(text) // 2], encoding="utf-8")
    for name in ("cut", "foreign"):
        (home / name).mkdir()
        tokenizer = Tokenizer.byte_level()
        write_token_file(home / name / "tokens.bin", [tokenizer.encode(text)], tokenizer)
        tokenizer.save(home / name / "tokenizer.json")
    os.truncate(home / "cut" / "tokens.bin", 999)
    Tokenizer.word_level("another vocabulary").save(home / "foreign" / "tokenizer.json")
    flags = ["--preset", "nano", "--data", home / "corpus.txt", "--steps", 4, "--checkpoint-every", 2, "--sample", 0]
    done = script("train_gpt2.py", *flags, "--out", home / "run")
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture
def directory(home, tmp_path):
    """A copy of `home` for one test."""
    return Path(shutil.copytree(home, tmp_path / "home", symlinks=True))


def script(name, *argv, **options):
    argv = [sys.executable, name, *map(str, argv)]
    options = dict(cwd=STAGE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120) | options
    return subprocess.run(argv, **options)


def snapshot(path):
    """{relative path: content of a file, True for a directory, target of a link} of everything below `path`."""
    return {
        str(file.relative_to(path)): os.readlink(file) if file.is_symlink() else file.is_dir() or file.read_bytes()
        for file in Path(path).rglob("*")
    }


def assert_one_clear_line(code, err, *words):
    assert code == 2, err
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err, f"{word!r} is not in: {err}"


def expand(row, directory):
    """The words of a row, with `directory` in the place of {dir}."""
    return [word.replace("{dir}", str(directory)) for word in row.split("|")]


# -- training: flags, then the words of the error line ----------------------------------------------------------------

TRAINING = [
    # the corpus
    ("--data|{dir}/missing.txt", "cannot read|missing.txt|No such file"),
    ("--data|{dir}/empty.txt", "empty.txt is empty"),
    ("--data|{dir}/empty", "cannot read|empty|Is a directory"),
    ("--data|{dir}/blank.txt", "the corpus has 1 tokens|one window of 16 needs 17"),
    ("--data|{dir}/short.txt", "the corpus has 4 tokens|one window of 16 needs 17"),
    ("--data|{dir}/latin1.txt", "latin1.txt is not UTF-8|byte 3"),
    ("--data|{dir}/cut.txt", "cut.txt is not UTF-8|byte 5"),
    ("--data|{dir}/cut", "tokens.bin has 999 bytes|truncated"),
    ("--data|{dir}/foreign", "made with another tokenizer|256|2"),
    ("--data|{dir}/noise.bin", "cannot read the tokenizer|tokenizer.json"),
    ("--tokenizer|{dir}/missing.json", "missing.json"),
    ("--tokenizer|{dir}/broken.json", "broken.json"),
    ("--tokenizer|{dir}/other.json", "other.json|Unigram"),
    ("--tokenizer|{dir}/none.json", "none.json|a tokenizer without tokens"),
    ("--tokenizer|{dir}/list.json", "list.json"),
    ("--tokenizer|letters", "letters"),
    # validation
    ("--val-data|{dir}/missing.txt", "cannot read|missing.txt"),
    ("--val-data|{dir}/empty.txt", "empty.txt is empty"),
    ("--val-data|{dir}/strange.txt", "aardvark|not in the vocabulary"),
    ("--val-data|{dir}/short.txt", "not in the vocabulary"),
    ("--val-fraction|2", "the validation fraction is 2"),
    ("--val-fraction|1", "the validation fraction is 1"),
    ("--val-fraction|-0.1", "the validation fraction is -0.1"),
    ("--val-fraction|nan", "the validation fraction is nan"),
    ("--val-fraction|0.001", "the corpus has 1 tokens|one window of 16"),
    ("--val-data|{dir}/corpus.txt|--val-fraction|0.1", "--val-data|--val-fraction 0.1 exclude each other"),
    # the model
    ("--preset|gigantic", "--preset gigantic is unknown|nano, tiny, paper, book, gpt2"),
    ("--n-embd|33", "n_embd 33 is not divisible by n_head 2"),
    ("--n-head|5", "n_embd 32 is not divisible by n_head 5"),
    ("--n-head|0", "n_head|0"),
    ("--n-layer|0", "n_layer|0"),
    ("--n-embd|-32", "n_embd|-32"),
    ("--block-size|0", "block_size|0"),
    ("--seq-len|17", "--seq-len 17|block of 16"),
    ("--seq-len|0", "--seq-len 0"),
    ("--seq-len|-4", "--seq-len -4"),
    # the batch and its division
    ("--batch-size|0", "--batch-size 0"),
    ("--batch-size|-4", "--batch-size -4"),
    ("--batch-size|6|--micro-batches|4", "--batch-size 6 is not divisible by --micro-batches 4|use --micro-batches 2"),
    ("--micro-batches|3", "--micro-batches 3 is not a power of two"),
    ("--micro-batches|0", "--micro-batches 0"),
    ("--micro-batches|-1", "--micro-batches -1"),
    ("--micro-batches|8", "--batch-size 4 is not divisible by --micro-batches 8"),
    ("--micro-batches|5|--no-deterministic", "--micro-batches 5|--batch-size 4"),
    ("--threads|0", "--threads 0 must be at least 1"),
    ("--threads|-2", "--threads -2"),
    # the recipe
    ("--steps|-1", "--steps -1 must not be negative"),
    ("--lr|-0.1", "--lr -0.1"),
    ("--lr|nan", "--lr nan"),
    ("--lr|inf", "--lr inf"),
    ("--min-lr|-1", "--min-lr -1"),
    ("--min-lr|nan", "--min-lr nan"),
    ("--schedule|triangle", "--schedule triangle is unknown|constant, linear or cosine"),
    ("--warmup|-1", "--warmup -1"),
    ("--clip|-1", "--clip -1"),
    ("--clip|nan", "--clip nan"),
    ("--weight-decay|-0.1", "--weight-decay -0.1"),
    ("--weight-decay|inf", "--weight-decay inf"),
    ("--beta1|1", "--beta1 1"),
    ("--beta2|-0.5", "--beta2 -0.5"),
    ("--eps|nan", "--eps nan"),
    ("--seed|-1", "--seed -1"),
    ("--precision|bf16", "--precision bf16 is not available on the CPU"),
    ("--precision|fp8", "--precision|fp8|fp32"),
    ("--rounding|stochastic", "--rounding stochastic|--precision fp32 has no such copy|--rounding nearest"),
    ("--rounding|up", "--rounding|up|nearest"),
    # intervals and sizes
    ("--log-every|0", "--log-every 0"),
    ("--log-every|-1", "--log-every -1"),
    ("--eval-every|-1", "--eval-every -1"),
    ("--checkpoint-every|-1", "--checkpoint-every -1"),
    ("--eval-every|5", "--eval-every 5 needs validation data"),
    ("--n-embd|2147483646", "2147483646 wide|take a smaller model"),
    ("--n-layer|2147483646", "2147483646 layers|take a smaller model"),
    ("--keep|-1", "--keep -1"),
    ("--sample|-1", "--sample -1"),
    # where to write
    ("--out|{dir}/file", "file|cannot write checkpoints here"),
    ("--out|{dir}/file/run", "file/run|cannot write checkpoints here"),
    ("--out|/proc/nothing", "/proc/nothing|cannot write checkpoints here"),
    ("--log|{dir}/missing/log.jsonl", "missing/log.jsonl|cannot be written|No such file"),
    ("--log|{dir}/empty", "empty|cannot be written|Is a directory"),
    ("--plot|{dir}/missing/curve.png", "missing/curve.png|cannot be written"),
    ("--plot|{dir}/empty", "empty|cannot be written"),
    # where to start
    ("--resume|{dir}/nothing", "nothing|does not exist"),
    ("--resume|{dir}/file", "file|is a file, not a directory"),
    ("--resume|{dir}/empty", "empty|not a checkpoint"),
    ("--resume|{dir}/run|--init-from|{dir}/run", "--resume and --init-from exclude each other"),
    ("--resume|{dir}/run|--log|{dir}/empty", "empty|cannot be written|Is a directory"),
    ("--init-from|{dir}/nothing", "nothing|does not exist"),
    ("--init-from|{dir}/empty", "empty|not a checkpoint"),
    ("--init-from|{dir}/run|--n-layer|3", "--n-layer 3 is not the checkpoint's 2"),
    ("--init-from|{dir}/run|--tokenizer|byte", "256 tokens|the checkpoint's vocabulary"),
    # unknown flags and values of the wrong type
    ("--stepz|3", "unrecognized arguments: --stepz 3"),
    ("--steps", "--steps|expected one argument"),
    ("--steps|five", "--steps|five"),
    ("--lr|fast", "--lr|fast"),
    ("--batch-size|99999999999999999999", "--batch-size|99999999999999999999 is too large"),
    ("--n-embd|3000000000", "--n-embd|3000000000 is too large"),
    ("corpus.txt", "unrecognized arguments: corpus.txt"),
]


@pytest.mark.parametrize("flags, words", TRAINING, ids=[row[0] for row in TRAINING])
def test_a_mistake_in_training_is_one_line_and_changes_no_checkpoint(train, directory, flags, words):
    before = snapshot(directory / "run")
    base = ["--preset", "nano", "--data", directory / "corpus.txt", "--steps", 6, "--out", directory / "run"]
    result = train(*base, "--overwrite", *expand(flags, directory))
    assert_one_clear_line(result.code, result.err, *words.split("|"))
    assert result.out == "" and snapshot(directory / "run") == before


# -- resuming a run ---------------------------------------------------------------------------------------------------

RESUMING = [
    ("--data|{dir}/less.txt", "was trained on|but --data has|the same corpus"),
    ("--data|{dir}/other.txt", "not in the vocabulary"),
    ("--data|{dir}/missing.txt", "cannot read|missing.txt"),
    ("--n-embd|64", "--n-embd 64 is not the checkpoint's 32"),
    ("--n-head|4", "--n-head 4 is not the checkpoint's 2"),
    ("--n-layer|1", "--n-layer 1 is not the checkpoint's 2"),
    ("--block-size|32", "--block-size 32 is not the checkpoint's 16"),
    ("--preset|tiny", "--preset tiny is not the checkpoint's nano"),
    ("--seq-len|32", "--seq-len 32|block of 16"),
    ("--tokenizer|byte", "256 tokens|the checkpoint's vocabulary"),
    ("--batch-size|7|--micro-batches|2", "--batch-size 7|--micro-batches 2"),
    ("--lr|nan", "--lr nan"),
    ("--steps|-5", "--steps -5"),
]


@pytest.mark.parametrize("flags, words", RESUMING, ids=[row[0] for row in RESUMING])
def test_resuming_with_other_flags_is_refused_and_changes_no_checkpoint(train, directory, flags, words):
    run = directory / "run"
    before = snapshot(run)
    result = train("--resume", run, "--out", run, "--steps", 6, *expand(flags, directory))
    assert_one_clear_line(result.code, result.err, *words.split("|"))
    assert snapshot(run) == before


def state(**changes):
    return lambda path: edit_json(path, **changes)


def argument(**changes):
    def change(path):
        edit_json(path, arguments=json.loads(path.read_text())["arguments"] | changes)

    return change


def config(**changes):
    return state(**changes)


def other_tensors(path):
    """Write the same names with another width."""
    write_safetensors(path, {name: array[..., :-2] for name, array in read_safetensors(path)[0].items()})


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


def noise(path):
    path.write_bytes(np.random.default_rng(0).bytes(500))


CONFIG, MODEL, OPTIMIZER = "config.json", "model.safetensors", "optimizer.safetensors"
STATE, TOKENIZER = "state.json", "tokenizer.json"
BOTH, RESUME, INFER = ("resume", "infer"), ("resume",), ("infer",)
BROKEN = [
    # file, damage, commands that read the file, words of the error line
    (CONFIG, Path.unlink, BOTH, CONFIG),
    (MODEL, Path.unlink, BOTH, MODEL),
    (OPTIMIZER, Path.unlink, RESUME, "no such file, so no run can be resumed"),
    (STATE, Path.unlink, RESUME, STATE),
    (TOKENIZER, Path.unlink, INFER, "has no tokenizer.json"),
    (CONFIG, cut, BOTH, "truncated or corrupted"),
    (MODEL, cut, BOTH, "truncated or corrupted"),
    (OPTIMIZER, cut, RESUME, "truncated or corrupted"),
    (STATE, cut, RESUME, "truncated or corrupted"),
    (TOKENIZER, cut, BOTH, TOKENIZER),
    (CONFIG, noise, BOTH, "truncated or corrupted"),
    (MODEL, noise, BOTH, "truncated or corrupted"),
    (OPTIMIZER, noise, RESUME, "truncated or corrupted"),
    (STATE, noise, RESUME, "truncated or corrupted"),
    (TOKENIZER, noise, BOTH, TOKENIZER),
    (MODEL, other_tensors, BOTH, "wrong shape"),
    (OPTIMIZER, other_tensors, RESUME, "wrong shape"),
    (CONFIG, config(n_embd=64), BOTH, "wrong shape"),
    (CONFIG, config(n_layer=3), BOTH, "missing"),
    (CONFIG, config(n_head=5), BOTH, "n_embd 32 is not divisible by n_head 5"),
    (CONFIG, config(n_embd="wide"), BOTH, "wide"),
    (CONFIG, config(model_type="llama"), BOTH, "llama"),
    (STATE, state(step="four"), RESUME, "'step'"),
    (STATE, state(step=-4), RESUME, "'step'"),
    (STATE, state(position=None), RESUME, "'position'"),
    (STATE, state(corpus=3), RESUME, "was trained on 3"),
    (STATE, state(arguments=[1]), RESUME, "arguments is [1]"),
    (STATE, argument(batch_size="four"), RESUME, "batch_size is 'four'"),
    (STATE, argument(lr=[3e-4]), RESUME, "lr is [0.0003]"),
    (STATE, argument(preset="gigantic"), RESUME, "preset is 'gigantic'"),
    (STATE, argument(data=7), RESUME, "data is 7"),
]


@pytest.mark.parametrize(
    "file, damage, words, which",
    [(file, damage, words, which) for file, damage, commands, words in BROKEN for which in commands],
)
def test_a_damaged_checkpoint_is_named_and_not_changed(train, infer, directory, file, damage, words, which):
    run = directory / "run"
    damage(run / "step-00000004" / file)
    before = snapshot(run)
    if which == "resume":
        result = train("--resume", run, "--out", run, "--steps", 6)
    else:
        result = infer("--weights", run, "--prompt", "the model", "--max-new-tokens", 2)
    assert_one_clear_line(result.code, result.err, words, str(run))
    assert snapshot(run) == before


# -- inference --------------------------------------------------------------------------------------------------------

INFERENCE = [
    ("--weights|{dir}/nothing", "nothing|does not exist"),
    ("--weights|{dir}/empty", "empty|not a checkpoint"),
    ("--weights|{dir}/file", "file|is a file, not a directory"),
    ("--prompt|", "the prompt is empty"),
    ("--prompt|the model reads one aardvark", "' aardvark'|not in the vocabulary|1 unknown in total"),
    ("--prompt|the\nmodel\tstops", "not in the vocabulary"),
    ("--prompt|the \udcff", "lone surrogate U+DCFF"),
    ("--prompt-file|{dir}/missing.txt", "cannot read|missing.txt"),
    ("--prompt-file|{dir}/empty.txt", "empty.txt is empty"),
    ("--prompt-file|{dir}/blank.txt", "the prompt is empty"),
    ("--prompt-file|{dir}/latin1.txt", "latin1.txt is not UTF-8|byte 3"),
    ("--prompt-file|{dir}/empty", "Is a directory"),
    ("--prompt|the|--prompt-file|{dir}/corpus.txt", "--prompt and --prompt-file exclude each other"),
    ("--prompt|the|--tokenizer|byte", "256 tokens|the weights in"),
    ("--prompt|the|--tokenizer|{dir}/broken.json", "broken.json"),
    ("--prompt|the|--temperature|-1", "--temperature -1"),
    ("--prompt|the|--temperature|nan", "--temperature nan"),
    ("--prompt|the|--temperature|inf", "--temperature inf"),
    ("--prompt|the|--temperature|1|--top-k|-1", "--top-k -1"),
    ("--prompt|the|--top-k|-1", "--top-k -1"),
    ("--prompt|the|--temperature|1|--top-p|2", "--top-p 2"),
    ("--prompt|the|--top-p|2", "--top-p 2"),
    ("--prompt|the|--top-p|0", "--top-p 0"),
    ("--prompt|the|--top-p|nan", "--top-p nan"),
    ("--prompt|the|--seed|-1", "--seed -1"),
    ("--prompt|the|--max-new-tokens|-1", "--max-new-tokens -1"),
    ("--prompt|the|--threads|0", "--threads 0"),
    ("--prompt|the|--precision|bf16", "--precision bf16 is not available on the CPU"),
    ("--prompt|the|--precision|int8", "--precision|int8"),
    ("--threads|99999999999", "--threads|99999999999 is too large"),
    ("--promt|the|--prompt|the", "unrecognized arguments: --promt the"),
    ("--temperature|hot", "--temperature|hot"),
    ("--interactive|--prompt|the", "--interactive reads its prompts from standard input: omit --prompt"),
    ("--interactive|--prompt-file|{dir}/corpus.txt", "omit --prompt-file"),
    ("--interactive|--prompts|{dir}/corpus.txt", "omit --prompts"),
    ("--interactive|--mode|batch|--prompts|{dir}/corpus.txt", "--interactive and --mode batch exclude each other"),
]


@pytest.mark.parametrize("flags, words", INFERENCE, ids=[ascii(row[0]) for row in INFERENCE])
def test_a_mistake_in_inference_is_one_line_before_any_text(infer, home, flags, words):
    result = infer("--weights", home / "run", *expand(flags, home))
    assert_one_clear_line(result.code, result.err, *words.split("|"))
    assert result.out == ""


def test_checkpoints_need_a_directory(train):
    result = train("--preset", "nano", "--checkpoint-every", 5)
    assert_one_clear_line(result.code, result.err, "--checkpoint-every 5 saves nothing", "give --out")


def test_weights_whose_corpus_is_missing_need_a_prompt(infer, home, tmp_path):
    shutil.copytree(home / "run" / "latest", tmp_path / "weights")
    argument(data=str(tmp_path / "gone.txt"))(tmp_path / "weights" / "state.json")
    result = infer("--weights", tmp_path / "weights", "--max-new-tokens", "2")
    assert_one_clear_line(result.code, result.err, "dummy.txt cannot be the prompt of these weights")


# -- errors during the run --------------------------------------------------------------------------------------------


def has_finite_parameters_of(run, step):
    loaded = load_checkpoint(run, with_optimizer=True)
    return loaded.state["step"] == step and all(np.isfinite(array).all() for array in loaded.parameters.values())


def test_a_loss_that_becomes_nan_stops_at_its_step(train, directory):
    log = directory / "log.jsonl"
    flags = ("--preset", "nano", "--data", directory / "corpus.txt", "--steps", 5, "--lr", 1e30, "--log", log)
    result = train(*flags)
    assert_one_clear_line(result.code, result.err, "step 1: the loss is nan", "--lr (now 1e+30)")
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0]


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(train, directory, every):
    run = directory / "run"
    before = snapshot(run)
    flags = ("--resume", run, "--out", run, "--steps", 9, "--lr", 1e30, "--checkpoint-every", every)
    result = train(*flags)
    words = "step 4: the norm of the parameters" if every else "step 5: the loss"
    assert_one_clear_line(result.code, result.err, words)
    assert snapshot(run) == before and has_finite_parameters_of(run, 4)


def test_parameters_that_diverge_in_the_last_step_are_not_saved(train, directory):
    run = directory / "run"
    result = train("--resume", run, "--out", run, "--steps", 5, "--lr", 1e30)
    assert_one_clear_line(result.code, result.err, "step 4: the norm of the parameters")
    assert has_finite_parameters_of(run, 4)


def test_a_validation_loss_that_is_nan_stops_too(train, directory):
    flags = ("--preset", "nano", "--data", directory / "corpus.txt", "--val-fraction", 0.2, "--steps", 1)
    result = train(*flags, "--lr", 1e30)
    assert_one_clear_line(result.code, result.err, "step 0: the validation loss is nan")


def test_warnings_of_a_diverging_run_do_not_reach_standard_error(directory):
    flags = ("--preset", "nano", "--data", directory / "corpus.txt", "--steps", 5, "--lr", 1e30, "--threads", 2)
    done = script("train_gpt2.py", *flags)
    assert_one_clear_line(done.returncode, done.stderr, "step 1: the loss is nan")


def test_a_full_disk_during_a_save_keeps_the_earlier_checkpoints(train, directory, monkeypatch):
    run, original, saved = directory / "run", safetensors_file.write_hashed, []

    def write_hashed(file, digest, data):
        saved.append(file.name)
        if len({*saved}) > 3:  # weights and moments of step 5, then a file of step 6
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, digest, data)

    monkeypatch.setattr(safetensors_file, "write_hashed", write_hashed)
    flags = ("--resume", run, "--out", run, "--steps", 9, "--checkpoint-every", 1)
    result = train(*flags)
    assert_one_clear_line(result.code, result.err, "step-00000006", "No space left on device", "are unchanged")
    assert has_finite_parameters_of(run, 5) and has_finite_parameters_of(run / "step-00000004", 4)
    assert {path.name for path in run.glob("step-*")} == {"step-00000004", "step-00000005"}
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("flag", ["--log", "--plot"])
def test_a_full_disk_under_the_log_or_the_plot_is_one_line(train, directory, flag):
    run = directory / "run"
    result = train("--resume", run, "--steps", 6, "--sample", 0, flag, FULL)
    assert_one_clear_line(result.code, result.err, "/dev/full: cannot be written", "No space")
    assert has_finite_parameters_of(run, 4)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_the_log_loses_no_step(train, directory):
    run = directory / "run"
    result = train("--resume", run, "--out", run, "--steps", 60, "--sample", 0, "--log", FULL)
    steps = load_checkpoint(run, with_optimizer=True).state["step"]
    assert 4 < steps < 60 and has_finite_parameters_of(run, steps)
    saved = f"the {steps} steps made are saved: continue with --resume {run} --out {run}"
    assert_one_clear_line(result.code, result.err, "/dev/full: cannot be written", f"at step {steps - 2}", saved)


def test_a_log_on_a_full_disk_ends_with_a_complete_line(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", None, 1, 0, 3)
    log(Step(0, 1.5, 1e-3, 2.0, 10.0, 0.1), None, None)
    before = (tmp_path / "log.jsonl").read_text()

    class Full:
        name = tmp_path / "log.jsonl"

        def write(self, text):
            with open(self.name, "a") as file:
                file.write(text[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    log.file = Full()
    with pytest.raises(ConfigError, match="cannot be written .No space left on device. at step 1: free some space"):
        log(Step(1, 1.4, 1e-3, 2.0, 10.0, 0.1), None, None)
    log(Step(2, 1.3, 1e-3, 2.0, 10.0, 0.1), None, None)  # the error is raised only once
    log.close()
    assert (tmp_path / "log.jsonl").read_text() == before


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("name", ["train_gpt2.py", "inference.py"])
def test_a_full_disk_under_the_output_is_one_line(home, name):
    flags = {
        "train_gpt2.py": ["--preset", "nano", "--data", home / "corpus.txt", "--steps", 2],
        "inference.py": ["--weights", home / "run", "--prompt", "the model"],
    }[name]
    with FULL.open("w") as full:
        done = script(name, *flags, stdout=full)
    assert_one_clear_line(done.returncode, done.stderr, "No space left on device")


def test_too_little_memory_is_one_line(train, directory, monkeypatch):
    def no_memory(*args, **options):
        raise np._core._exceptions._ArrayMemoryError((1 << 40,), np.dtype(np.float32))

    monkeypatch.setattr("gpt2core.trainer.initial_parameters", no_memory)
    result = train("--preset", "nano", "--data", directory / "corpus.txt")
    assert_one_clear_line(result.code, result.err, "out of memory", "Unable to allocate", "--batch-size")


@pytest.mark.parametrize(
    "name, flags, words",
    [
        ("train_gpt2.py", ["--stepz", "3"], "unrecognized arguments: --stepz 3"),
        ("train_gpt2.py", ["--data", "/missing.txt"], "cannot read /missing.txt"),
        ("train_gpt2.py", ["--preset", "nano", "--lr", "nan"], "--lr nan"),
        ("inference.py", ["--weights", "/missing"], "/missing: does not exist"),
        ("inference.py", ["--prompt", "aardvark"], "aardvark"),
        ("inference.py", ["--prompt", b"\xff"], "U+DCFF"),
    ],
)
def test_the_scripts_print_one_line_too(home, name, flags, words):
    if "--prompt" in flags:
        flags = ["--weights", home / "run", *flags]
    done = subprocess.run([sys.executable, name, *flags], cwd=STAGE, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 2)
    assert_one_clear_line(done.returncode, done.stderr, words)
