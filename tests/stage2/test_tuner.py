"""The tuner: it times each shape once, caches on disk, gives all ranks the same choices, and never makes a run fail."""

# B batch, T time, C channels, H heads, D = C // H

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core import tuned_choices  # noqa: E402
from gpt2core.app import cli  # noqa: E402
from gpt2core.errors import ConfigError  # noqa: E402
from stage2_cuda.attention import launches as attention  # noqa: E402
from stage2_cuda.attention import tuned_tiles  # noqa: E402
from stage2_cuda.attention.launches import AttentionTiles, TileConfig  # noqa: E402
from stage2_cuda.cuda_backend import PRECISIONS, CudaBackend, dtype_of  # noqa: E402
from stage2_cuda.cuda_runtime import CudaRuntime, InterpreterRuntime  # noqa: E402
from stage2_cuda.gemm import products  # noqa: E402
from stage2_cuda.runtime.triton_launch import interpreted  # noqa: E402
from stage2_cuda.tuning import tuner as autotune
from stage2_cuda.tuning.tuner import Tuner  # noqa: E402
from tests.support.fake_cupy import FakeCupy  # noqa: E402

GPU = "Fake GPU, cublasLt 130000, Triton 3.6.0"
FILE = "Fake-GPU-cublasLt-130000-Triton-3.6.0.json"
gpu = pytest.mark.gpu
in_the_interpreter = pytest.mark.skipif(not interpreted(), reason="a GPU has tests of its own below")


class Kernel:
    """A kernel with candidates {name: (milliseconds, value)}: each takes so long and writes the value, or raises it."""

    def __init__(self, cupy, **candidates):
        self.cupy, self.candidates, self.ran = cupy, candidates, []
        self.output = cupy.empty((3, 5), np.float32)

    def run(self, candidate):
        takes, writes = self.candidates[candidate]
        if isinstance(writes, BaseException):
            raise writes

        def work():
            self.ran.append(candidate)
            self.cupy.clock += takes
            if writes is not None:
                self.output[...] = writes

        self.cupy.current.submit(work)

    def chosen(self, tuner, what="kernel", **options):
        return tuner.choose(what, list(self.candidates), self.run, [self.output], **options)


def user_warnings(caught):
    """The messages of UserWarnings; a ResourceWarning of another test may come at any time."""
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.fixture
def fake():
    return FakeCupy()


@pytest.fixture
def notes():
    return []


@pytest.fixture
def tuner(fake, tmp_path, notes):
    return Tuner(fake, GPU, tmp_path / "cache", notes.append)


# -- which one wins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes, wins", [(5, "other"), (9.85, "other"), (9.95, "table"), (10, "table"), (20, "table")])
def test_another_candidate_wins_by_more_than_one_percent(fake, tuner, takes, wins):
    assert Kernel(fake, table=(10, 7), other=(takes, 7)).chosen(tuner) == wins


def test_the_fastest_of_many_wins_and_the_order_of_timing_alternates(fake, tuner):
    kernel = Kernel(fake, table=(100, 7), slow=(300, 7), fast=(40, 7), faster=(30, 7))
    assert kernel.chosen(tuner) == "faster"
    # one call per graph, because a call takes long: one warm-up round and five timed rounds, in several orders
    turns = [kernel.ran[at : at + 4] for at in range(len(kernel.ran) - 24, len(kernel.ran), 4)]
    assert turns[0] == list(kernel.candidates) and all(sorted(turn) == sorted(turns[0]) for turn in turns)
    assert len({*map(tuple, turns)}) > 2


def test_short_calls_are_timed_several_at_a_time(fake, tuner):
    kernel = Kernel(fake, table=(0.01, 7), other=(0.005, 7))
    assert kernel.chosen(tuner) == "other"
    assert {*kernel.ran[-40:-20]} | {*kernel.ran[-20:]} == {"table", "other"} and len({*kernel.ran[-20:]}) == 1


@pytest.mark.parametrize(
    "writes", [8, np.nan, None, RuntimeError("out of resource: shared memory"), MemoryError("of the device")]
)
def test_a_candidate_that_fails_or_writes_other_results_is_skipped(fake, tuner, writes):
    kernel = Kernel(fake, table=(1.0, 7), bad=(0.1, writes), other=(0.5, 7 * (1 + 1e-4)))  # another order of sums
    assert kernel.chosen(tuner) == "other"


@pytest.mark.parametrize("takes, wins", [(9.9, "first"), (9.7, "second")])
def test_if_the_default_cannot_run_the_first_that_runs_takes_its_place(fake, tuner, takes, wins):
    too_large = RuntimeError("out of resource: shared memory")
    assert Kernel(fake, table=(1, too_large), first=(10, 7), second=(takes, 7)).chosen(tuner) == wins


def test_the_tolerance_depends_on_the_type():
    want = np.linspace(1, 2, 40).reshape(8, 5)
    for dtype, near, far in ((np.float16, 1e-2, 3e-2), (np.float32, 1e-3, 3e-3)):
        got, wanted = (want * (1 + near)).astype(dtype), want.astype(dtype)
        autotune.check([got], [wanted])
        with pytest.raises(ArithmeticError):
            autotune.check([(want * (1 + far)).astype(dtype)], [wanted])


@pytest.mark.parametrize("piece", [1, 7, 10**6])
def test_the_difference_does_not_depend_on_pieces_or_views(monkeypatch, piece):
    monkeypatch.setattr(autotune, "PIECE", piece)
    rng = np.random.default_rng()
    got, want = rng.standard_normal((2, 6, 4, 9), dtype=np.float32)[..., 2:5]
    error = np.linalg.norm((got - want).astype(np.float64)) / np.linalg.norm(want.astype(np.float64))
    assert autotune.difference(got, want) == pytest.approx(error, rel=1e-6)
    assert autotune.difference(want, want) == 0 == autotune.difference(0 * want, 0 * want)
    assert np.isnan(autotune.difference(got * np.nan, want)) and np.isnan(autotune.difference(got, want * np.inf))


def test_before_is_called_once_before_timing(fake, tuner):
    made = []
    assert Kernel(fake, table=(1.0, 7), other=(0.5, 7)).chosen(tuner, before=lambda: made.append(1)) == "other"
    Kernel(fake, table=(1.0, 7), other=(0.5, 7)).chosen(tuner, before=lambda: made.append(2))
    assert made == [1]


# -- without timing ----------------------------------------------------------------------------------------------------


def test_without_timing_the_first_is_chosen_and_nothing_is_run_or_written(fake, tmp_path, notes):
    kernel = Kernel(fake, table=(1.0, 7), other=(0.5, 7))
    assert kernel.chosen(Tuner(fake, None, tmp_path, notes.append)) == "table"
    assert not kernel.ran and not notes and not list(tmp_path.iterdir()) and fake.waits == 0


@pytest.mark.parametrize("final", [False, True])
def test_compiling_ahead_launches_all_candidates_to_time_and_prepares_their_comparison(fake, tuner, monkeypatch, final):
    threads = {}
    launcher = SimpleNamespace(only_compiles=True, start_thread=threads.__setitem__)
    monkeypatch.setattr(autotune.triton_launch, "launcher", lambda: launcher)
    kernel, launched = Kernel(fake, table=(10, 7), other=(5, 7)), []
    kernel.run = launched.append
    tuner.load_tuned({}, final)
    assert kernel.chosen(tuner) == "table" and not tuner.tuned
    assert launched == (["table"] if final else ["table", "other"])
    assert list(threads) == ([] if final else [("check", np.dtype("float32"))])
    for compile_check in threads.values():
        compile_check()  # raises nothing


def test_nothing_is_timed_while_a_stream_is_captured(fake, tuner, notes):
    kernel, stream = Kernel(fake, table=(1.0, 7), other=(0.5, 7)), fake.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        assert kernel.chosen(tuner) == "table"
        stream.end_capture()
    assert not kernel.ran and not notes and not tuner.tuned


def test_after_final_choices_nothing_is_timed_any_more(fake, tuner):
    kernel = Kernel(fake, table=(1.0, 7), other=(0.5, 7))
    assert kernel.chosen(tuner) == "other"
    tuner.load_tuned(tuner.tuned, final=True)
    count = len(kernel.ran)
    assert (kernel.chosen(tuner), kernel.chosen(tuner, "another shape")) == ("other", "table")
    assert len(kernel.ran) == count and list(tuner.tuned) == ["kernel"]


@pytest.mark.parametrize("error", [RuntimeError("cudaErrorUnknown\nmore"), MemoryError(), ZeroDivisionError("x")])
def test_after_an_error_the_run_continues_with_the_defaults_and_one_warning(fake, tmp_path, monkeypatch, error):
    def failing(*arguments):
        raise error

    monkeypatch.setattr(autotune, "medians", failing)
    tuner = Tuner(fake, GPU, tmp_path, lambda text: None)
    kernel = Kernel(fake, table=(1.0, 7), other=(0.5, 7))
    with pytest.warns(UserWarning, match="kernel: cannot be timed .* uses the default configurations") as caught:
        assert [kernel.chosen(tuner, what) for what in ("kernel", "kernel", "another")] == ["table"] * 3
    assert len(user_warnings(caught)) == 1 and "\n" not in user_warnings(caught)[0]
    assert tuner.tuned == {"kernel": "table", "another": "table"}  # for the other ranks
    assert not list(tmp_path.iterdir())  # the next run tries again


def test_results_that_are_not_finite_are_not_timed(fake, tuner):
    with pytest.warns(UserWarning, match="differ by nan"):
        assert Kernel(fake, table=(1.0, np.nan), other=(0.5, np.nan)).chosen(tuner) == "table"


def test_a_keyboard_interrupt_is_not_a_failed_candidate(fake, tuner):
    with pytest.raises(KeyboardInterrupt):
        Kernel(fake, table=(1.0, 7), other=(0.5, KeyboardInterrupt())).chosen(tuner)
    assert not tuner.tuned


# -- the cache on disk -------------------------------------------------------------------------------------------------


def test_the_first_run_times_with_one_note_and_the_second_reads_the_cache(fake, tuner, tmp_path, notes):
    kernel = Kernel(fake, table=(1.0, 7), other=(0.5, 7))
    assert [kernel.chosen(tuner, what) for what in ("a", "b", "a")] == ["other"] * 3
    assert notes == [f"timing kernels for this GPU, only once: results are saved in {tmp_path / 'cache' / FILE}"]
    cache = json.loads((tmp_path / "cache" / FILE).read_text())
    assert cache == {"made_for": GPU, "choices": {"a": "other", "b": "other"}}
    count = len(kernel.ran)
    again = Tuner(fake, GPU, tmp_path / "cache", notes.append)
    assert [kernel.chosen(again, what) for what in ("b", "a")] == ["other"] * 2
    assert len(kernel.ran) == count and len(notes) == 1


def test_retune_times_and_writes_everything_again(fake, tuner, tmp_path):
    Kernel(fake, table=(1.0, 7), other=(0.5, 7)).chosen(tuner)
    again = Tuner(fake, GPU, tmp_path / "cache", lambda text: None)
    again.retune()
    assert Kernel(fake, table=(1.0, 7), other=(2.0, 7)).chosen(again) == "table"
    assert json.loads((tmp_path / "cache" / FILE).read_text())["choices"] == {"kernel": "table"}


def test_a_choice_that_is_not_a_candidate_any_more_is_timed_again(fake, tuner):
    tuner.tuned["kernel"] = "a tile of an earlier version"
    assert Kernel(fake, table=(1.0, 7), other=(0.5, 7)).chosen(tuner) == "other"
    assert tuner.tuned == {"kernel": "other"}


BROKEN = {
    "{": "JSONDecodeError",
    "[" * 10**5: "RecursionError",
    "[]": "TypeError",
    f'{{"made_for": "{GPU}"}}': "KeyError",
    f'{{"made_for": "{GPU}", "choices": {{"kernel": 3}}}}': "a choice is not a string",
    f'{{"made_for": "{GPU}", "choices": ["kernel"]}}': "AttributeError",
    '{"made_for": "Old GPU, cublasLt 1, Triton 3.6.0", "choices": {}}': f"made for Old GPU.*, this is {GPU}",
}


@pytest.mark.parametrize("content, why", BROKEN.items(), ids=range(len(BROKEN)))
def test_a_damaged_or_foreign_cache_is_one_warning_and_is_rewritten(fake, tmp_path, content, why):
    kernel = Kernel(fake, table=(1.0, 7), other=(0.5, 7))
    (tmp_path / FILE).write_text(content)
    with pytest.warns(UserWarning, match=f"the autotune cache .* is ignored and will be rewritten: .*{why}") as caught:
        assert kernel.chosen(Tuner(fake, GPU, tmp_path, lambda text: None)) == "other"
    assert len(user_warnings(caught)) == 1
    assert json.loads((tmp_path / FILE).read_text()) == {"made_for": GPU, "choices": {"kernel": "other"}}
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_cache_that_is_not_utf_8_is_damaged_too(fake, tmp_path):
    (tmp_path / FILE).write_bytes(b"\xff")
    with pytest.warns(UserWarning, match="is ignored and will be rewritten: UnicodeDecodeError"):
        Tuner(fake, GPU, tmp_path)


def test_a_cache_that_cannot_be_written_is_a_warning(fake, tmp_path):
    (tmp_path / "file").write_text("")
    kernel = Kernel(fake, table=(1.0, 7), other=(0.5, 7))
    with pytest.warns(UserWarning, match="the autotune cache"):
        assert kernel.chosen(Tuner(fake, GPU, tmp_path / "file", lambda text: None)) == "other"


def test_without_a_home_directory_every_run_times_again(fake, notes, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert tuned_choices.cache_directory() is None
    tuner = Tuner(fake, GPU, tuned_choices.cache_directory(), notes.append)
    assert Kernel(fake, table=(1.0, 7), other=(0.5, 7)).chosen(tuner) == "other"
    assert notes == ["timing kernels for this GPU, in every run: there is no home directory"]


def test_two_processes_keep_each_other_s_choices(fake, tmp_path):
    first, second = (Tuner(fake, GPU, tmp_path, lambda text: None) for _ in range(2))
    kernel = Kernel(fake, table=(1.0, 7), other=(0.5, 7))
    for tuner, what in ((first, "a"), (second, "b"), (first, "c")):
        kernel.chosen(tuner, what)
    assert json.loads((tmp_path / FILE).read_text())["choices"] == dict.fromkeys("acb", "other")


# -- other ranks and resumed runs -------------------------------------------------------------------------------------


def test_a_rank_uses_the_choices_that_it_loads_and_caches_them(fake, tuner, tmp_path):
    kernel = Kernel(fake, table=(1.0, 7), other=(0.5, 7), roots=(0.6, 7))
    assert kernel.chosen(tuner) == "other"
    assert not tuner.load_tuned(dict(tuner.tuned))
    count = len(kernel.ran)
    assert tuner.load_tuned({"kernel": "roots", "b": "other"}, final=True)
    assert [kernel.chosen(tuner, what) for what in ("kernel", "b")] == ["roots", "other"] and len(kernel.ran) == count
    # so the next run starts with the loaded choice; "b", which this process has not timed, is not written
    assert json.loads((tmp_path / "cache" / FILE).read_text())["choices"] == {"kernel": "roots"}


def test_before_the_first_step_a_rank_has_only_the_root_s_choices_and_times_the_rest(fake, tmp_path):
    Tuner(fake, GPU, tmp_path).keep("b", "table")
    kernel, tuner = Kernel(fake, table=(1.0, 7), other=(0.5, 7)), Tuner(fake, GPU, tmp_path, lambda text: None)
    tuner.load_tuned({"kernel": "table"})
    # "b" is timed again: the root may choose another candidate, which must be compiled here before a graph is captured
    assert (kernel.chosen(tuner), kernel.chosen(tuner, "b")) == ("table", "other")


# -- attention's tiles -------------------------------------------------------------------------------------------------


class Recorder(Tuner):
    """Always chooses the last candidate, and records the candidates of each choice."""

    def __init__(self):
        super().__init__(None)
        self.asked = {}

    def choose(self, what, candidates, run, outputs, before=lambda: None):
        assert len(set(map(str, candidates))) == len(candidates), "two candidates of one name"
        assert all(isinstance(config, AttentionTiles) for config in candidates)
        self.asked[what] = candidates
        return candidates[-1]


def asked(T, D, dtype=np.float16, precision="ieee", tuner=None, H=2, gluon=None):
    """-> {what: candidates} for this shape, and the configs that are launched at last. gluon: a gluon_table()."""
    tuner, qkv = tuner or Recorder(), np.empty((1, T, 3 * H * D), dtype)
    arrays = np.empty((1, T, H * D), dtype), np.empty((1, H, T), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, tuned_tiles):
            patch.setattr(module, "gluon_table", lambda *_: gluon or {})
        forward = tuned_tiles.tuned_forward(tuner, None, *arrays, qkv, H, precision)
        backward = tuned_tiles.tuned_backward(tuner, None, np.empty_like(qkv), arrays[1], qkv, H, precision)
    return getattr(tuner, "asked", None), forward, backward


@pytest.mark.parametrize("T", [1, 256, 1024, 4096, 16384])
@pytest.mark.parametrize("D", [8, 64, 80, 128])
@pytest.mark.parametrize("kind", ["16 bits", "tf32x3", "tf32", "ieee"])
def test_the_table_comes_first_and_is_taken_where_nothing_is_timed(T, D, kind):
    dtype, precision = (np.float16, "ieee") if kind == "16 bits" else (np.float32, kind)
    table = attention.default_tiles(np.dtype(dtype).itemsize, T, D, precision)
    _, forward, backward = asked(T, D, dtype, precision, Tuner(None))
    assert (forward, backward) == (AttentionTiles(table.forward), table._replace(forward=None))


def test_one_launch_for_all_of_backward_is_tried_against_two_where_T_is_not_long():
    for T, parts in ((256, {"forward", "backward"}), (1024, {"forward", "dq", "dk", "backward"})):
        found, _, backward = asked(T, 64)
        assert {what.split()[1] for what in found} == parts and len({bool(c.both) for c in next(
            candidates for what, candidates in found.items() if "backward" in what)}) == 2  # fmt: skip
        assert bool(backward.both) == (T == 1024)  # the last
    found, _, backward = asked(16384, 64)
    ((table, best),) = (candidates for what, candidates in found.items() if "backward" in what)  # each as a whole
    assert best == backward != table and all(each.dq and each.dkdv and not each.both for each in (table, best))


@pytest.mark.parametrize("T, D", [(1024, 64), (16384, 64), (4096, 128)])
def test_with_gluon_kernels_every_plain_candidate_of_earlier_versions_remains(T, D):
    gluon = attention.GLUON_TILES["H200"]
    plain, (found, _, _) = asked(T, D)[0], asked(T, D, gluon=gluon)
    table = attention.default_tiles(2, T, D, "ieee", gluon)
    for (what, candidates), part in zip(found.items(), ("forward", "dq", "dkdv", None), strict=True):
        first = AttentionTiles(**{part: getattr(table, part)}) if part else table._replace(forward=None)
        assert candidates[0] == first
        if len(plain[what]) > 1 and part:  # otherwise no choice was stored, or that of the whole backward pass
            assert set(plain[what]) < set(candidates)
    assert attention.default_tiles(2, T, D, "ieee")._replace(forward=None) in candidates


def test_what_a_choice_is_for_names_all_that_it_depends_on():
    kinds = [(256, 64), (1024, 64), (1024, 80), (1024, 64, np.float32, "tf32"), (1024, 64, np.float32, "tf32x3")]
    names = [next(iter(asked(*kind)[0])) for kind in kinds] + [next(iter(asked(1024, 64, H=3)[0]))]
    assert names[1] == "attention forward float16 1 x 1024, 2 heads of 64, ieee" and len(set(names)) == len(names)


def tried():
    """Every tile that may be chosen: (what is multiplied, D, part, tile)."""
    return [
        (kind, D, part, tile)
        for (kind, D), parts in tuned_tiles.TRIED.items()
        for part, tiles in parts.items()
        for tile in tiles
    ]


def oracle(qkv, dy, H):
    """y and dqkv in float64."""
    B, T, columns = qkv.shape
    D = columns // 3 // H
    q, k, v = qkv.reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)  # (B, H, T, D)
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / D**0.5, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    g = dy.reshape(B, T, H, D).swapaxes(1, 2)
    dp = g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / D**0.5
    dqkv = np.stack([ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g])
    return (p @ v).swapaxes(1, 2).reshape(B, T, H * D), dqkv.transpose(1, 3, 0, 2, 4).reshape(qkv.shape)


def arrays_of(rng, xp, kind, T, H, D):
    """qkv and dy of random numbers, and room for y, lse, delta and dqkv, all NaN."""
    qkv, dy = (xp.asarray(rng.standard_normal((1, T, n * H * D), np.float32)).astype(kind) for n in (3, 1))
    rows = [xp.full((1, H, T), np.nan, np.float32) for _ in range(2)]
    return qkv, dy, xp.full_like(dy, np.nan), *rows, xp.full_like(qkv, np.nan)


def check_gradients(qkv, dy, y, dqkv, H, tolerance):
    want_y, want = oracle(*(host(x) for x in (qkv, dy)), H)
    for got, wanted in ((host(y), want_y), (host(dqkv), want)):
        assert np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)


def host(array):
    array = array.astype(np.float32)  # which holds every fp16 and bf16
    return (array if isinstance(array, np.ndarray) else array.get()).astype(np.float64)


SMALL = TileConfig(64, 64, 4, 2)
# the interpreter knows neither warps nor stages, and computes all in fp32, or in fp16, which stands for bf16
SEEN = sorted({(part, tile._replace(num_warps=4, num_stages=2)) for _, _, part, tile in tried()})


@in_the_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of scores that are then masked
@pytest.mark.parametrize("part, tile", SEEN, ids=[str(AttentionTiles(**{part: tile})) for part, tile in SEEN])
def test_every_candidate_has_float64_s_gradients(rng, part, tile):
    qkv, dy, y, lse, delta, dqkv = arrays_of(rng, np, np.float16, 137, 1, 8)  # more than a tile of rows, and a bit
    config = AttentionTiles(SMALL, dq=SMALL, dkdv=SMALL)._replace(**{part: tile})
    attention.attention_forward(y, lse, qkv, 1, "ieee", config)
    attention.attention_backward(dqkv, delta, dy, qkv, y, lse, 1, "ieee", config)
    check_gradients(qkv, dy, y, dqkv, 1, 2e-3)  # p, ds and the results are rounded to fp16, 2^-11 each


@in_the_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize(
    "table, last", [(AttentionTiles(SMALL, both=SMALL), "dq"), (AttentionTiles(SMALL, SMALL, SMALL), "both")]
)
def test_a_backend_that_tries_all_and_takes_the_last_has_float64_s_gradients(rng, fake, monkeypatch, table, last):
    monkeypatch.setattr(autotune, "MAX_CALLS", 1)
    monkeypatch.setattr(autotune, "medians", lambda cupy, stream, graphs: -np.arange(len(graphs)))
    monkeypatch.setitem(attention.DEFAULT_TILES, "16 bits", {(64, attention.NO_LIMIT): table})
    backend, (qkv, dy, *_) = CudaBackend("fp16"), arrays_of(rng, np, np.float16, 37, 1, 8)
    backend.runtime.tuner = Tuner(fake, GPU, notify=lambda text: None)
    y, aux = backend.attention_forward(qkv, 1)
    dqkv = backend.attention_backward(dy, qkv, y, aux, 1)
    check_gradients(qkv, dy, y, dqkv, 1, 2e-3)
    assert not backend.runtime.tuner.failed
    *parts, whole = backend.runtime.tuner.tuned.values()
    tried = tuned_tiles.TRIED["16 bits", 64]
    assert whole.startswith(last) and parts == [
        str(AttentionTiles(**{part: tried[part][-1]})) for part in ("forward", "dq", "dkdv")[: len(parts)]
    ]
    assert np.array_equal(backend.attention_backward(dy, qkv, y, aux, 1), dqkv)


@in_the_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_a_run_times_once_and_keeps_its_choices_on_disk_and_in_its_checkpoint(
    command, corpus, fake, tmp_path, monkeypatch
):
    class TunedRuntime(InterpreterRuntime):
        tuned, tuned_for, load_tuned = CudaRuntime.tuned, CudaRuntime.tuned_for, CudaRuntime.load_tuned

    class TunedBackend(CudaBackend):
        def __init__(self, precision, deterministic):
            super().__init__(precision, deterministic)
            self.runtime = TunedRuntime()
            self.runtime.tuner = Tuner(fake, GPU, tmp_path / "cache", self.runtime.notify)

    def run():
        flags = "--preset nano --n-layer 1 --n-embd 16 --seq-len 8 --batch-size 1 --steps 1 --sample 0".split()
        result = command(
            cli.train, *flags, "--data", corpus, "--out", tmp_path / "run", "--overwrite", backend=TunedBackend
        )
        assert result.code == 0, result.err
        return result.err

    few = {part: [SMALL] for part in ("forward", "dq", "dkdv")}
    monkeypatch.setattr(autotune, "MAX_CALLS", 1)
    monkeypatch.setitem(tuned_tiles.TRIED, ("tf32x3", 64), few)
    assert run() == f"timing kernels for this GPU, only once: results are saved in {tmp_path / 'cache' / FILE}\n"
    choices = json.loads((tmp_path / "cache" / FILE).read_text())["choices"]
    assert [what.split()[1] for what in choices] == ["forward", "dq", "dk"]
    assert run() == ""
    state = json.loads((tmp_path / "run" / "latest" / "state.json").read_text())
    assert (state["choices"], state["chosen_for"]) == (choices, GPU)


@in_the_interpreter
def test_the_interpreter_refuses_the_flag(train2, corpus):
    result = train2("--preset", "nano", "--data", corpus, "--autotune")
    assert (result.code, result.out) == (2, "") and result.err.count("\n") == 1
    assert "--autotune: the Triton interpreter tunes nothing; omit the flag" in result.err


def test_deterministic_mode_refuses_the_flag():
    runtime = CudaBackend(deterministic=True).runtime
    with pytest.raises(ConfigError, match="`autotune` and `deterministic` exclude each other"):
        CudaRuntime.retune(runtime)  # also in the interpreter


# -- on a GPU ----------------------------------------------------------------------------------------------------------

KINDS = {"16 bits": ("bf16", 1e-2), "tf32": ("tf32", 4e-3), "tf32x3": ("fp32", 1e-5)}  # --precision, tolerance


def kind_of(kind):
    """-> the type, what tl.dot makes of fp32, and the tolerance of one kind of products."""
    name, precision = PRECISIONS[KINDS[kind][0]]
    return dtype_of(name), precision, KINDS[kind][1]


@gpu
@pytest.mark.parametrize("T", [1024, 1000])
def test_every_candidate_has_float64_s_gradients_on_this_gpu(rng, T):
    import cupy

    for kind, D, part, tile in tried():
        dtype, precision, tolerance = kind_of(kind)
        qkv, dy, y, lse, delta, dqkv = arrays_of(rng, cupy, dtype, T, 2, D)
        config = attention.select_tiles(qkv, 2, precision)
        if part in ("dq", "dkdv") and config.both:
            config = AttentionTiles(config.forward, SMALL, SMALL)
        config = config._replace(**{part: tile})
        attention.attention_forward(y, lse, qkv, 2, precision, config)
        attention.attention_backward(dqkv, delta, dy, qkv, y, lse, 2, precision, config)
        check_gradients(qkv, dy, y, dqkv, 2, tolerance)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T, D", [(256, 64), (1024, 64), (600, 80), (4200, 64)])
def test_what_is_chosen_here_has_float64_s_gradients_and_is_timed_once(rng, tmp_path, notes, monkeypatch, kind, T, D):
    import cupy

    (dtype, _, tolerance), H = kind_of(kind), 2
    qkv, dy, *_ = arrays_of(rng, cupy, dtype, T, H, D)
    backend, results, before = CudaBackend(KINDS[kind][0], deterministic=False), [], None
    for _ in range(2):
        backend.runtime.tuner = Tuner(cupy, "this GPU", tmp_path, notes.append)
        y, aux = backend.attention_forward(qkv, H)
        dqkv = backend.attention_backward(dy, qkv, y, aux, H)
        check_gradients(qkv, dy, y, dqkv, H, tolerance)
        results.append([cupy.asnumpy(array.astype(np.float32)) for array in (y, dqkv)])
        assert before is None or backend.runtime.tuner.tuned == before
        before = dict(backend.runtime.tuner.tuned)
        monkeypatch.setattr(Tuner, "fastest_of", None)  # the second reads
    has_choice = kind == "16 bits" or D <= 64
    assert len(notes) == has_choice and all(np.array_equal(*pair) for pair in zip(*results, strict=True))
    assert backend.runtime.tuner.failed is False and not backend.runtime.tuner.timed


@gpu
def test_a_second_run_times_nothing_and_gives_the_same_curve(train2, tmp_path, monkeypatch):
    monkeypatch.setattr(products, "cache_directory", lambda: tmp_path / "cache")

    def run(*flags):
        log, named = tmp_path / "log", ("--log", tmp_path / "log", "--overwrite")
        result = train2("--preset", "tiny", "--precision", "bf16", "--steps", 5, "--sample", 0, *named, *flags)
        assert result.code == 0, result.err
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        return result.err.count("timing kernels for this GPU, only once: "), [row["loss"] for row in rows]

    (first, curve), (again, second), (anew, third) = run(), run(), run("--autotune")
    assert (first, again, anew) == (1, 0, 1)
    np.testing.assert_allclose(second, curve, rtol=1e-3)  # cublasLt may add in any order, where it was faster
    np.testing.assert_allclose(third, curve, rtol=2e-2)  # by other algorithms: rounded elsewhere, in 8 bits
