"""`train_step --llmc DIR`: errors, the checkpoint for llm.c, and the comparison of its losses with ours."""

import math
import shutil

import numpy as np
import pytest

from benchmarks.cpu import train_step
from benchmarks.harness import report
from benchmarks.harness.processes import BenchmarkFailed, run_main
from benchmarks.harness.result_tables import TABLES
from benchmarks.peers import llmc
from gpt2core.architecture import GPT2Config
from gpt2core.model import initial_parameters

# The functions and types of llm.c that the benchmark calls. The loss is a sum that depends on all that it passes.
STUB = """
#include <stdio.h>
typedef struct { int header[256]; float first, last, mean_loss; int numbers; } GPT2;
void gpt2_build_from_checkpoint(GPT2 *model, const char *path) {
    FILE *file = fopen(path, "rb");
    fread(model->header, 4, 256, file);
    fread(&model->first, 4, 1, file);
    fseek(file, -4, SEEK_END);
    model->numbers = ftell(file) / 4 + 1 - 256;
    fread(&model->last, 4, 1, file);
    fclose(file);
}
void gpt2_forward(GPT2 *model, int *inputs, int *targets, size_t B, size_t T) {
    model->mean_loss = 1000 * inputs[0] + targets[B * T - 1];
}
void gpt2_zero_grad(GPT2 *model) { model->mean_loss += 0.5f; }
void gpt2_backward(GPT2 *model) { model->mean_loss += model->numbers; }
void gpt2_update(GPT2 *model, float lr, float beta1, float beta2, float eps, float weight_decay, int t) {
    model->mean_loss += 100000 * t;
}
"""
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc compiles llm.c")


def ends_with(monkeypatch, capsys, *flags):
    """The exit code and the line of an error of train_step with these flags."""
    monkeypatch.setattr("sys.argv", ["train_step", *map(str, flags)])
    with pytest.raises(SystemExit) as ended:
        run_main(train_step.main, measures_time=False)
    return ended.value.code, capsys.readouterr().err


def test_a_wrong_folder_a_missing_gcc_and_another_model_are_one_line(tmp_path, monkeypatch, capsys):
    flags = "--llmc", tmp_path, "--preset", "gpt2"
    where = f"error: --llmc {tmp_path}"
    no_file = f"{where} has no file train_gpt2.c: give a checkout of github.com/karpathy/llm.c\n"
    assert ends_with(monkeypatch, capsys, *flags) == (2, no_file)
    (tmp_path / "train_gpt2.c").write_text("")
    monkeypatch.setenv("PATH", "")
    no_gcc = f"{where}: gcc, which compiles llm.c, was not found: install it or omit the flag\n"
    assert ends_with(monkeypatch, capsys, *flags) == (2, no_gcc)
    monkeypatch.setattr(llmc.shutil, "which", str)
    untied = f"{where}: llm.c trains only models with a tied embedding: use --preset gpt2\n"
    assert ends_with(monkeypatch, capsys, "--llmc", tmp_path, "--preset", "tiny") == (2, untied)


@needs_gcc
def test_a_program_that_gcc_cannot_compile_is_one_line(tmp_path):
    (tmp_path / "train_gpt2.c").write_text("int main() { return 0; }\n")
    says = r"gcc cannot compile train_gpt2.c: .*GPT2.*: use commit f1e2ace"
    with pytest.raises(llmc.ConfigError, match=says) as raised:
        llmc.build(tmp_path, tmp_path / "library.so")
    assert "\n" not in str(raised.value)


@needs_gcc
def test_the_compiled_program_gets_the_weights_and_the_tokens(tmp_path, rng):
    (tmp_path / "train_gpt2.c").write_text(STUB)
    config = GPT2Config(130, 8, 2, 2, 4)
    step = llmc.make_trainer(config, 2, 3, 1, str(tmp_path))
    numbers = sum(array.size for _, array in initial_parameters(config, 0)) + (256 - 130) * 4  # 256 rows with padding
    for count in (1, 2):
        inputs, targets = rng.integers(0, 130, (2, 2, 3))
        assert step(inputs, targets) == 1000 * inputs[0, 0] + targets[1, 2] + 0.5 + numbers + 100000 * count


def test_a_checkpoint_has_the_weights_of_each_kind_for_all_layers_as_out_in(tmp_path, rng):
    config = GPT2Config(130, 8, 2, 2, 4)
    arrays = {name: rng.random(array.shape, np.float32) for name, array in initial_parameters(config, 0)}
    llmc.write_checkpoint(tmp_path / "model.bin", config, arrays.items())
    header, values = np.fromfile(tmp_path / "model.bin", np.int32, 256), np.fromfile(tmp_path / "model.bin", np.float32)
    assert header[:8].tolist() == [20240326, 3, 8, 130, 2, 2, 4, 256] and not header[8:].any()
    wte, wpe, ln_1, bias, c_attn = np.split(values[256:], np.cumsum([256 * 4, 8 * 4, 2 * 4, 2 * 4, 2 * 12 * 4]))[:5]
    assert np.array_equal(wte.reshape(256, 4)[:130], arrays["transformer.wte.weight"]) and not wte[130 * 4 :].any()
    assert np.array_equal(wpe.reshape(8, 4), arrays["transformer.wpe.weight"])
    for layer in range(2):
        name = f"transformer.h.{layer}."
        assert np.array_equal(ln_1.reshape(2, 4)[layer], arrays[f"{name}ln_1.weight"])
        assert np.array_equal(bias.reshape(2, 4)[layer], arrays[f"{name}ln_1.bias"])
        assert np.array_equal(c_attn.reshape(2, 12, 4)[layer], arrays[f"{name}attn.c_attn.weight"].T)
    assert np.array_equal(values[-8:-4], arrays["transformer.ln_f.weight"])
    assert np.array_equal(values[-4:], arrays["transformer.ln_f.bias"])


def test_losses_of_another_model_are_not_saved(rng):
    losses = rng.uniform(5, 6, 3).tolist()
    measured = {"ours": {"warm_up": {"losses": losses[:1]}, "rounds": [{"losses": losses[1:]}]}}
    train_step.check_losses(measured)  # without llm.c there is nothing to compare
    rounded = np.float32(losses).tolist()
    measured["llm.c"] = {"warm_up": {"losses": rounded[:1]}, "rounds": [{"losses": rounded[1:]}]}
    train_step.check_losses(measured)
    for wrong in (losses[2] * 1.001, math.nan):
        measured["llm.c"]["rounds"] = [{"losses": [rounded[1], wrong]}]
        with pytest.raises(BenchmarkFailed, match="llm.c computes another model"):
            train_step.check_losses(measured)


def test_the_table_has_the_ratio_to_llmc_only_where_it_was_measured():
    def rows(*names):
        common = {"threads": 1, "cpu_seconds": 1.0, "peak_bytes": 2**20, "import_bytes": 2**20}
        seconds = {"ours": 2.0, "torch eager": 3.0, "llm.c": 9.0, "sgemm floor": 1.0}
        results = [{"name": name, "seconds": [[seconds[name]]] * 3, **common} for name in names]
        train_step.summarise(results)
        return TABLES["cpu-step"].cells([{"results": report.summarised(results)}])

    (with_llmc,) = rows("ours", "torch eager", "llm.c", "sgemm floor")
    assert (with_llmc["ours: times as fast as llm.c"], with_llmc["ours: times as fast as PyTorch"]) == ("4.50", "1.50")
    (without,) = rows("ours", "torch eager", "sgemm floor")
    assert not without.get("ours: times as fast as llm.c")
