"""The Python API: the texts and losses of the commands, exceptions instead of exits, and nothing printed unasked."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import staged_gpt2 as sg
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.settings.definitions import InferenceSettings
from gpt2core.app.settings.setting_fields import defaults_of, flag
from staged_gpt2.arguments import without_flags
from staged_gpt2.stages import chosen_stage
from tests.support.interpreter import interpreter_works

ROOT = Path(__file__).resolve().parents[2]
NANO = dict(preset="nano", steps=4, stage=0)


@pytest.fixture(autouse=True)
def nothing_is_printed(capsys):
    """No function of the API prints, or warns, unless the test asks for it and reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert capsys.readouterr() == ("", "")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The path of a model of preset tiny, with the words of the shipped corpus."""
    path = tmp_path_factory.mktemp("weights") / "tiny"
    sg.train(preset="tiny", steps=20, stage=0).model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(weights):
    return sg.GPT2.from_pretrained(weights, stage=0)


def flags_of(settings):
    """The words of a command line with these settings."""
    return [word for name, value in settings.items() for word in (flag(name), value)]


def continuation(done):
    """The text that inference.py prints after the prompt."""
    return done.out.split("Continuation:\n")[1].removesuffix("\n")


# -- the same results as the commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [dict(), dict(top_k=10, seed=1), dict(top_p=0.9, temperature=0.8, seed=2), dict(stop=" the")]
)
def test_generate_returns_the_text_of_the_command(model, weights, infer, options):
    prompt = "In the spring of"
    done = infer("--weights", weights, "--prompt", prompt, "--max-new-tokens", 9, *flags_of(options))
    assert model.generate(prompt, 9, **options) == continuation(done)
    assert "".join(model.generate(prompt, 9, stream=True, **options)) == continuation(done)


def test_a_list_of_prompts_gives_the_texts_of_mode_batch(model, weights, infer, tmp_path):
    prompts = ["In the spring of", "the notebook", "the model"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    done = infer(
        "--weights", weights, "--mode", "batch", "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 5,
        "--top-k", 5, "--seed", 3,
    )  # fmt: skip
    texts = model.generate(prompts, 5, top_k=5, seed=3)
    assert [f"{text}\n" for text in texts] == re.findall(r"Continuation:\n(.*?\n)\n", done.out, re.S)
    assert model.generate(prompts[0], 5, top_k=5, seed=3) == texts[0]


def test_train_has_the_losses_and_the_parameters_of_the_command(train, corpus, tmp_path):
    recipe = dict(preset="nano", steps=6, lr=1e-2, seed=3, clip=1.0, val_fraction=0.2, eval_every=3, batch_size=4)
    train("--data", corpus, *flags_of(recipe), "--log", tmp_path / "log.jsonl", "--out", tmp_path / "command")
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    seen = []
    run = sg.train(corpus, stage=0, on_step=seen.append, **recipe, out=tmp_path / "api", log=tmp_path / "api.jsonl")
    assert run.losses == [row["loss"] for row in rows] and seen == run.steps and not run.interrupted
    assert run.validation == [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    wanted = load_checkpoint(tmp_path / "command").parameters
    for parameters in (load_checkpoint(tmp_path / "api").parameters, run.model.parameters):
        for name, array in wanted.items():
            found = parameters[name]
            assert_array_equal(found if isinstance(found, np.ndarray) else found.numpy(), array)
    logged = [json.loads(line) for line in (tmp_path / "api.jsonl").read_text().splitlines()]
    assert [row["parameters_sha256"] for row in (rows[-1], logged[-1])] == 2 * [rows[-1]["parameters_sha256"]]


def test_a_resumed_run_continues_with_the_same_bits(corpus, tmp_path):
    whole = sg.train(corpus, **NANO | dict(steps=6))
    sg.train(corpus, **NANO | dict(steps=2), out=tmp_path / "run")
    rest = sg.train(resume=tmp_path / "run", out=tmp_path / "run", steps=6, stage=0)
    assert rest.losses == whole.losses[2:]


def test_evaluate_is_the_validation_loss(corpus):
    run = sg.train(corpus, **NANO, val_data=corpus)
    # the command adds the losses of its micro-batches in another order
    assert sg.evaluate(run.model, corpus, batch_size=5) == pytest.approx(run.validation[-1][1], rel=1e-6)


@pytest.mark.skipif(not interpreter_works(), reason="Triton's interpreter does not work here")
def test_stage_2_has_the_loss_the_text_and_the_gradients_of_stage_0(corpus):
    recipe = dict(preset="nano", steps=1, batch_size=1, seq_len=8)
    runs = [sg.train(corpus, stage=stage, **recipe) for stage in (0, 2)]
    losses = [run.model.loss([[1, 2, 3]], [[2, 3, 4]]) for run in runs]
    for loss in losses:
        loss.backward()
    serial, gpu = runs
    assert gpu.losses == pytest.approx(serial.losses, rel=1e-5)  # fp32, another order of sums
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert gpu.model.generate("the", 1) == serial.model.generate("the", 1)
    for name, tensor in serial.model.parameters.items():
        assert_allclose(gpu.model.parameters[name].grad, tensor.grad, atol=1e-5)  # gradients are up to 0.3


# -- models ------------------------------------------------------------------------------------------------------------


def test_a_saved_model_is_the_same_after_it_is_loaded(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")  # replaces the first one
    loaded = sg.GPT2.from_pretrained(tmp_path / "saved", stage=0)
    assert loaded.config == model.config and loaded.tokenizer.to_bytes() == model.tokenizer.to_bytes()
    for name, tensor in model.parameters.items():
        assert_array_equal(loaded.parameters[name].numpy(), tensor.numpy())
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "saved" / name).is_file()


def test_a_saved_model_replaces_no_checkpoint_of_a_run(corpus, tmp_path):
    run = sg.train(corpus, **NANO, out=tmp_path / "run")
    with pytest.raises(sg.CheckpointError, match="step-00000004 .* of a training run: choose another directory"):
        run.model.save_pretrained(tmp_path / "run")


@pytest.mark.skipif(not interpreter_works(), reason="Triton's interpreter does not work here")
def test_a_model_of_16_bits_is_saved_unrounded_except_what_has_changed(corpus, tmp_path):
    run = sg.train(corpus, **NANO | dict(steps=1), out=tmp_path / "run")
    half = sg.GPT2.from_pretrained(tmp_path / "run", stage=2, precision="fp16")
    name, other = "transformer.ln_f.weight", "transformer.wte.weight"
    half.parameters[name].data += 1
    half.save_pretrained(tmp_path / "half")
    saved, wanted = load_checkpoint(tmp_path / "half").parameters, run.model.parameters
    assert_array_equal(saved[other], wanted[other].numpy())
    assert_allclose(saved[name], wanted[name].numpy() + 1, rtol=1e-3)  # the rounding of fp16


def test_backward_gives_the_slope_of_the_loss(model):
    ids, targets = [[5, 6, 7], [1, 2, 3]], [[6, 7, 8], [2, 3, 4]]
    bias = model.parameters["transformer.h.0.mlp.c_fc.bias"]
    for tensor in model.parameters.values():
        tensor.grad = None
    model.loss(ids, targets).backward()
    assert {name for name, tensor in model.parameters.items() if tensor.grad is None} == set()
    direction, width, original = bias.grad / np.linalg.norm(bias.grad), 0.05, bias.data.copy()
    values = []
    for sign in (1, -1):
        bias.data[...] = original + sign * width * direction
        with sg.no_grad():
            values.append(model.loss(ids, targets).item())
    bias.data[...] = original
    # float32 losses with rounding errors of 1e-6 over a width of 0.1
    assert (values[0] - values[1]) / (2 * width) == pytest.approx(np.linalg.norm(bias.grad), rel=1e-2, abs=1e-4)


def test_the_loss_is_the_cross_entropy_of_the_logits(model):
    ids, targets = np.array([[5, 6, 7]]), np.array([[6, 7, 8]])
    logits = model(ids).numpy().astype(np.float64)
    wanted = np.mean(np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0])
    assert logits.shape == (1, 3, model.config.vocab_size)
    assert model.loss(ids, targets).item() == pytest.approx(wanted, rel=1e-5)


def test_text_follows_parameters_that_were_changed(model, weights, tmp_path):
    changed = sg.GPT2.from_pretrained(weights, stage=0)
    before = changed.generate("In the spring of", 5)
    assert before == model.generate("In the spring of", 5)
    changed.parameters["transformer.ln_f.bias"].data += np.linspace(-2, 2, changed.config.n_embd, dtype=np.float32)
    changed.save_pretrained(tmp_path)
    loaded = sg.GPT2.from_pretrained(tmp_path, stage=0)
    assert before != changed.generate("In the spring of", 5) == loaded.generate("In the spring of", 5)


# -- how training ends -------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_training_with_the_run_so_far(corpus, tmp_path):
    handler = signal.getsignal(signal.SIGINT)

    def interrupt(step):
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    run = sg.train(corpus, **NANO | dict(steps=1000), on_step=interrupt, out=tmp_path / "run")
    assert run.interrupted and 3 <= len(run.steps) <= 4 and run.model.generate("the model", 1)
    assert signal.getsignal(signal.SIGINT) is handler
    assert load_checkpoint(tmp_path / "run", with_optimizer=True).state["step"] == len(run.steps)


def raise_at_step_1(error):
    def on_step(step):
        if step.step == 1:
            raise error

    return on_step


def test_an_error_of_on_step_is_raised_after_training_has_ended(corpus, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    for error in (ValueError("mine"), OSError("mine"), SystemExit(3)):
        with pytest.raises(type(error)) as raised:
            sg.train(corpus, **NANO | dict(steps=1000), on_step=raise_at_step_1(error))
        assert raised.value is error and signal.getsignal(signal.SIGINT) is handler
    run = sg.train(corpus, **NANO | dict(steps=1000), on_step=raise_at_step_1(KeyboardInterrupt()))
    assert run.interrupted and 2 <= len(run.steps) <= 3


def test_a_diverged_run_raises(corpus):
    with pytest.raises(sg.Diverged, match="^step .*Lower `lr`"):
        sg.train(corpus, **NANO | dict(steps=50), lr=1e30)


def test_the_losses_are_drawn_in_a_notebook_while_a_model_is_trained(corpus, monkeypatch):
    import IPython
    from IPython.core.interactiveshell import InteractiveShell

    with pytest.raises(sg.ConfigError, match="LossPlot draws in a notebook: in a program, use the setting `plot`"):
        sg.LossPlot()
    drawn = []
    handle = SimpleNamespace(update=drawn.append)
    shell = InteractiveShell()
    shell.kernel = None
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    for arguments, words in (((5,), "`title=5` must be a text"), (("", None), "`every=None` must be a number of sec")):
        with pytest.raises(sg.ConfigError, match=words):
            sg.LossPlot(*arguments)
    monkeypatch.setattr("IPython.display.display", lambda image, display_id: drawn.append(image) or handle)
    plot = sg.LossPlot("one run", every=1000)
    run = sg.train(corpus, **NANO | dict(steps=3), on_step=plot)
    assert [row["loss"] for row in plot.rows] == run.losses and len(drawn) == 2  # the first step, and the end
    assert all(image.data.startswith(b"\x89PNG") for image in drawn) and drawn[0].data != drawn[1].data


def test_a_progress_bar_and_steps_are_printed_only_on_request(corpus, capsys):
    sg.train(corpus, **NANO | dict(steps=1), progress=True, on_step=print)
    shown = capsys.readouterr()
    assert "/1 [" in shown.err and shown.out.startswith("FastStep(step=0, loss=")


def test_notes_are_warnings(corpus, tmp_path, model):
    sg.train(corpus, **NANO, out=tmp_path / "run")
    with pytest.warns(UserWarning, match="run held step-00000004 .* of an earlier run: it is now"):
        sg.train(corpus, **NANO, out=tmp_path / "run", overwrite=True)
    with pytest.warns(UserWarning, match="300 tokens, the model reads at most 64: only the last 64 are used"):
        model.generate(" the" * 300, 1)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(step=5), "`step=5`: there is no such setting: did you mean `steps`?"),
        (dict(xyz=5), "`xyz=5`: there is no such setting: docs/USAGE.md lists the settings"),
        (dict(batch_size=0), "`batch_size=0` must be at least 1"),
        (dict(batch_size=2.0), "`batch_size=2.0` must be a whole number"),
        (dict(batch_size=np.float32(2)), "`batch_size=2.0` must be a whole number"),
        (dict(lr="high"), "`lr='high'` must be a number"),
        (dict(data=5), "`data=5` must be a path"),
        (dict(stage="cpu"), "`stage='cpu'` is unknown: choose from auto, 0, 1, 2, 3"),
        (dict(stage=True), "`stage=True` is unknown: choose from auto, 0, 1, 2, 3"),
        (dict(preset="huge"), "`preset=huge` is unknown: choose from nano, "),
        (dict(on_step=5), "`on_step=5` must be a function of one argument, the Step"),
        (dict(progress=1), "`progress=1` must be true or false"),
        (dict(sample=3), "`sample=3` prints a text, which only the command does: call run.model.generate()"),
        (dict(dry_run=True), "`dry_run=True` prints a text, which only the command does: use the command, "),
        (dict(tp=2), "tp 2 is for many ranks, and this stage is one process: use stage 1"),
        (dict(graph=False), "graph=False has no meaning here: numpy has no CUDA graphs; omit it"),
        (dict(eval_every=2), "eval_every 2 needs validation data: give val_data FILE or val_fraction F"),
        (dict(precision="fp16"), "`precision=fp16` is not available on the CPU: use `precision=fp32` or bf16, or a"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value(corpus, settings, message):
    with pytest.raises(sg.ConfigError, match=f"^{re.escape(message)}"):
        sg.train(**dict(data=corpus) | NANO | settings)


def test_a_missing_file_is_refused_with_its_path(tmp_path, model):
    with pytest.raises(sg.DataError, match=r"cannot read .*absent.txt: No such file"):
        sg.train(tmp_path / "absent.txt", **NANO)
    with pytest.raises(sg.DataError, match=r"cannot read .*absent.txt: No such file"):
        sg.evaluate(model, tmp_path / "absent.txt")
    with pytest.raises(sg.CheckpointError, match="absent: does not exist: give a checkpoint directory"):
        sg.GPT2.from_pretrained(tmp_path / "absent")
    with pytest.raises(sg.ConfigError, match="OpenAI's weights are not shipped; download them with: hf download"):
        sg.GPT2.from_pretrained("gpt2")


@pytest.mark.parametrize("path", [None, 5, True])
def test_a_model_is_loaded_from_a_path_and_saved_to_one(model, path):
    for call in (sg.GPT2.from_pretrained, model.save_pretrained):
        with pytest.raises(sg.ConfigError, match=f"^`path={path}` must be the path of a directory"):
            call(path)


@pytest.mark.parametrize(
    "prompt, options, error, message",
    [
        ([1, 2], {}, sg.ConfigError, "`prompt=[1, 2]` must be a text, or a list of texts"),
        (5, {}, sg.ConfigError, "`prompt=5` must be a text, or a list of texts"),
        ("", {}, sg.DataError, "`prompt=''` is empty: give at least one word to continue"),
        (["the", ""], {}, sg.DataError, "`prompt=''` is empty"),
        ("xyzzy", {}, sg.DataError, "the word 'xyzzy' is not in the vocabulary"),
        ("the", dict(max_new_tokens=-1), sg.ConfigError, "`max_new_tokens=-1` must not be negative"),
        ("the", dict(max_new_tokens=1.5), sg.ConfigError, "`max_new_tokens=1.5` must be a whole number"),
        ("the", dict(top_k=-1), sg.ConfigError, "`top_k=-1` must be 0 (all tokens) or more"),
        ("the", dict(top_p=0.0), sg.ConfigError, "`top_p=0.0` must be above 0 and at most 1"),
        ("the", dict(temperature="hot"), sg.ConfigError, "`temperature='hot'` must be a number"),
        ("the", dict(stop=""), sg.ConfigError, "`stop=''` is in every text: give a text, or omit it"),
        ("the", dict(stream=1), sg.ConfigError, "`stream=1` must be true or false"),
        (["the"], dict(stream=True), sg.ConfigError, "`stream=True` is for one prompt, but there is a list of 1"),
    ],
)
def test_a_wrong_argument_of_generate_is_refused_with_its_value(model, prompt, options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        model.generate(prompt, **options)


@pytest.mark.parametrize(
    "ids, error, message",
    [
        ("the model", sg.ConfigError, "`ids='the model'` must be token ids (B, T): use [model.tokenizer.encode(text)]"),
        (["the model"], sg.ConfigError, "`ids=['the model']` must be token ids (B, T)"),
        ([[1.0, 2.0]], sg.ShapeError, "`ids`: tokens have dtype float64, but they must be integers"),
        ([1, 2], sg.ShapeError, "`ids`: shape (2,) must be (B, T), with at least one token: use [ids] for one text"),
        ([[]], sg.ShapeError, "`ids`: shape (1, 0) must be (B, T), with at least one token"),
        ([[1, 2], [3]], sg.ShapeError, "`ids`: the rows have different lengths, but they must be (B, T)"),
        ([[172]], sg.ShapeError, "`ids`: token 172 is outside the vocabulary of 172"),
        ([[-1]], sg.ShapeError, "`ids`: token -1 is outside the vocabulary of 172"),
        (np.zeros((1, 65), int), sg.ShapeError, "`ids`: 65 tokens exceed the model's block of 64"),
    ],
)
def test_wrong_ids_are_refused_with_their_value(model, ids, error, message):
    for call in (model, lambda ids: model.loss(ids, ids)):
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            call(ids)


def test_targets_of_another_shape_and_a_wrong_model_are_refused(model, corpus):
    with pytest.raises(sg.ShapeError, match=r"^`targets`: shape \(1, 1\) must be that of `ids`, \(1, 2\)"):
        model.loss([[1, 2]], [[3]])
    with pytest.raises(sg.ConfigError, match="^`model='out'` must be a GPT2: use GPT2.from_pretrained"):
        sg.evaluate("out", corpus)
    with pytest.raises(sg.ConfigError, match="^`seq_len=300` exceeds the model's block of 64 tokens"):
        sg.evaluate(model, corpus, seq_len=300)


def test_messages_name_settings_instead_of_flags():
    assert without_flags("--batch-size 10, --no-graph, --tp") == "batch_size 10, graph=False, tp"
    assert without_flags("use --unknown; omit the flag") == "use --unknown; omit it"


def test_the_stage_of_this_machine_is_one_process(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # then a GPU is not used
    assert chosen_stage("auto") == 0 and chosen_stage(3) == 3
    monkeypatch.setenv("PMI_SIZE", "2")
    assert chosen_stage("auto") == 1


def test_numbers_and_paths_of_other_types_are_accepted(corpus):
    run = sg.train(str(corpus), **NANO | dict(steps=np.int64(1)), lr=np.float32(0.5), batch_size=np.uint8(2))
    assert len(run.losses) == 1 and run.model.generate("the model", np.int32(1))


# -- the process -------------------------------------------------------------------------------------------------------

PROCESS = """
import os, sys
hook, environment = sys.excepthook, dict(os.environ)
import threadpoolctl, numpy
def threads():
    return [each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]
before = threads()
import staged_gpt2 as sg
assert sys.excepthook is hook and dict(os.environ) == environment and threads() == before
assert not {"cupy", "triton", "mpi4py", "torch"} & set(sys.modules)
sg.train(preset="nano", steps=1, stage=0)
assert threads() == before and sys.excepthook is hook
print(all(hasattr(sg, name) for name in sg.__all__), sys.excepthook is hook)
"""


def test_the_import_and_a_training_leave_the_process_as_it_was():
    variables = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    done = subprocess.run([sys.executable, "-c", PROCESS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True True\n")


def test_the_help_of_the_commands_and_the_api_have_the_same_defaults():
    """An argument of generate() that InferenceSettings has too."""
    names = ("max_new_tokens", "top_k", "top_p", "seed", "temperature")
    settings = defaults_of(InferenceSettings)
    defaults = (
        dict(zip(("max_new_tokens",), sg.GPT2.generate.__defaults__, strict=True)) | sg.GPT2.generate.__kwdefaults__
    )
    assert {name: defaults[name] for name in names} == {name: settings[name] for name in names}
