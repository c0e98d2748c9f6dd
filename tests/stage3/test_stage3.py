"""Stage 3 without GPUs: stage 2's bits under mpiexec in the interpreter, and its NCCL calls against a fake NCCL."""

import json
import platform
import re
import sys
import threading
import warnings
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.architecture import GPT2Config
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import ConfigError, UserError
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import parameter_hash
from gpt2core.training_loop import read_batch
from gpt2core.tree_sum import tree_sum
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi import watchdog
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.runtime import triton_launch
from stage3_mpi_cuda import nccl_communicator, staged_collectives
from stage3_mpi_cuda.nccl_collectives import NcclCollectives
from stage3_mpi_cuda.nccl_communicator import GpuBinding, NcclCommunicator
from stage3_mpi_cuda.staged_collectives import StagedCollectives
from stage3_mpi_cuda.watchdog import NcclErrors
from testing.fake_gpu import OnFakeGpu, fake_gpu
from tests.support.collectives import DTYPES, assert_same, check_every_collective, rank_inputs
from tests.support.jobs import mpi
from tests.support.mpi import ROOT, mpiexec
from tests.support.unsaved import unsaved

pytestmark = [
    pytest.mark.skipif(not triton_launch.interpreted(), reason="needs the interpreter; test_nccl.py tests GPUs"),
    pytest.mark.xdist_group("stage3"),  # one training of stage 2, with which the others are compared
]


# -- the collectives of GPU arrays -------------------------------------------------------------------------------------


def collectives_of(kind, threads):
    found = kind(threads, fake_gpu(threads))
    found.barrier = threads.barrier
    return found


def every_collective(threads, kind):
    comm = collectives_of(kind, threads)
    for rows in (0, 1, 13):
        for dtype in DTYPES:
            check_every_collective(comm, rows, rows, dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", [NcclCollectives, StagedCollectives])
def test_every_collective_of_gpu_arrays_equals_its_oracle(monkeypatch, kind, size):
    monkeypatch.setattr(staged_collectives, "CHUNK", 32)  # four chunks of a few dozen bytes
    run_ranks(size, every_collective, kind)


def sums(threads):
    """Sums of lengths that are not divisible by the ranks, zero included, in every dtype of NCCL and both orders."""
    comm = collectives_of(NcclCollectives, threads)
    for shape in ((), (1,), (7,), (2, 5), (0,)):
        for dtype in (*DTYPES, np.float16):
            xs = [
                x.astype(dtype) for x in rank_inputs(1, comm.size, shape, np.float32 if dtype is np.float16 else dtype)
            ]
            x = np.array(xs[comm.rank])
            wide = [np.float32(x) if dtype is np.float16 else x for x in xs]
            got = comm.all_reduce(x, out=np.full(shape, 77, dtype))
            assert_same(got, np.asarray(tree_sum(wide), dtype))  # float16 is added in float32 and rounded once
            comm.use_collectives("nccl")
            assert comm.all_reduce(x, out=x) is x
            np.testing.assert_allclose(
                x, np.asarray(tree_sum(wide), dtype), rtol=1e-2
            )  # another order, rounded to float16 each time
            comm.use_collectives("canonical")
    for dtype in (np.int32, np.int64):  # whole numbers that float32 does not have
        large = np.full(2 * comm.size, (1 << 24) + 1, dtype)
        assert_same(comm.all_reduce(large), comm.size * large)
        assert_same(comm.reduce_scatter(large), comm.size * large[:2])


@pytest.mark.parametrize("size", [2, 5])
def test_a_sum_of_any_length_and_dtype_has_the_canonical_order(size):
    with np.errstate(over="ignore"):
        run_ranks(size, sums)


def messages(threads):
    """Every rank posts its receives, then sends; a message may be empty, and a sum may be between start and wait."""
    comm = collectives_of(NcclCollectives, threads)
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    xs, outs = [[np.full(n, fill) for n in (3, 0, 5)] for fill in (comm.rank, -1)]
    receives = [comm.recv_start(out, source) for out in outs]
    sends = [comm.send_start(x, to) for x in xs]
    assert_same(comm.all_reduce(xs[0]), np.full(3, sum(range(comm.size))))
    for receive, out in zip(receives, outs, strict=True):
        assert receive.wait() is out
        assert_same(out, np.full(len(out), source))
    assert [send.wait() for send in sends] == [None] * 3 and comm.bytes_sent > 8 * xs[0].itemsize


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_all_receive_first_do_not_wait_forever(size):
    run_ranks(size, messages)


def mistakes(threads):
    comm = collectives_of(NcclCollectives, threads)
    for call, words in (
        (lambda: comm.all_reduce(np.zeros(4, np.uint16)), "NCCL cannot reduce uint16: use one of int32"),
        (lambda: comm.all_reduce(np.zeros(4), "mean"), "unknown reduction 'mean'"),
        (lambda: comm.reduce_scatter(np.zeros(5)), "axis 0 of length 5 is not divisible by 2 ranks"),
        (lambda: comm.send(np.zeros(4), 1 - comm.rank, tag=3), "tag 3: NCCL has no tags"),
        (lambda: comm.all_gather(np.zeros(4), out=np.zeros(4)), "out is float64 (4,)"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            call()


def test_unsupported_arguments_are_config_errors():
    run_ranks(2, mistakes)


# -- binding of ranks to GPUs, and the transport -----------------------------------------------------------------------

H200, A100, HOST = "NVIDIA H200", "NVIDIA A100", platform.node()


@pytest.fixture
def machine(monkeypatch):
    """machine([(name, PCI bus id) of each rank's GPU], asked) -> [transport or error text of each rank].

    without_nccl: the ranks whose CuPy finds no NCCL.
    """
    fake = threading.local()

    class Fixed(NcclCommunicator):
        def __init__(self, host, gpus, without_nccl):
            super().__init__(host)
            fake.gpu, fake.nccl = gpus[self.rank], self.rank not in without_nccl

    def bind_gpu(local_rank):
        return GpuBinding(None, local_rank, *fake.gpu)

    def import_nccl(cupy):
        if not fake.nccl:
            raise ConfigError("CuPy finds no NCCL: install it")

    monkeypatch.setattr(nccl_communicator, "bind_gpu", bind_gpu)
    monkeypatch.setattr(nccl_communicator, "import_nccl", import_nccl)
    monkeypatch.setattr(nccl_communicator, "watch_gpus", lambda world: None)
    monkeypatch.setattr(nccl_communicator, "triton_launch", SimpleNamespace(interpreted=lambda: False))

    def run(gpus, asked=None, without_nccl=()):
        def rank(threads):
            try:
                return Fixed(threads, gpus, without_nccl).use_transport(asked)
            except UserError as error:
                assert error.shared  # all ranks raise it, only the root prints it
                return str(error)

        return run_ranks(len(gpus), rank)

    return run


@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_the_sums_of_the_library_and_capture_are_those_of_the_transport(transport):
    world = object.__new__(NcclCommunicator)
    world.transport = transport
    assert (world.native_algorithm, world.capturable) == (transport, transport == "nccl")


def test_ranks_with_a_gpu_each_use_nccl_and_ranks_that_share_one_use_mpi(machine):
    with pytest.warns(UserWarning) as notes:
        assert machine([(H200, "0"), (H200, "1")]) == ["nccl"] * 2
        assert machine([(H200, "0"), (H200, "1")], "mpi") == ["mpi"] * 2 and not notes.list
        assert machine([(H200, "0"), (H200, "1"), (H200, "0")]) == ["mpi"] * 3
    (note,) = (str(each.message) for each in notes)
    assert "has 2 GPUs for 3 ranks, so ranks share GPUs" in note and note.endswith("using `transport=mpi`")


@pytest.mark.parametrize(
    "gpus, asked, without_nccl, words",
    [
        (
            [(H200, "0"), (H200, "1"), (A100, "2")],
            None,
            (),
            f"rank 2 has an {A100} on {HOST}, but rank 0 has an {H200} on {HOST}; select GPUs of one model",
        ),
        (
            [(H200, "0"), (H200, "0")],
            "nccl",
            (),
            f"`transport=nccl`: needs a GPU for each rank, but {HOST} has 1 GPU for 2 ranks; start one rank for each",
        ),
        ([(H200, "0"), (H200, "1")], None, (1,), "rank 1: CuPy finds no NCCL: install it"),
    ],
)
def test_every_rank_raises_the_error_of_a_transport_that_names_the_rank(machine, gpus, asked, without_nccl, words):
    for rank, message in enumerate(machine(gpus, asked, without_nccl)):
        assert words in message or (words == f"rank {rank}: {message}")


class Host:
    """A stand-in for a host: what bind_gpu() asks CuPy there. gpus: their number; "interpreter": TRITON_INTERPRET=1."""

    def __init__(self, name, gpus):
        self.name, self.gpus, self.current = name, gpus, None

    def array_module(self):
        if self.gpus == 0:
            raise ConfigError("no GPU was found: advice")
        runtime = SimpleNamespace(
            getDeviceCount=lambda: self.gpus, getDeviceProperties=lambda number: {"name": H200.encode()}
        )
        device = lambda number: SimpleNamespace(  # noqa: E731
            pci_bus_id=f"0000:{number}", use=lambda: setattr(self, "current", number)
        )
        return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=device, Stream=lambda non_blocking: None))


@pytest.fixture
def on_hosts(monkeypatch):
    """on_hosts([(ranks, GPUs) of host0, host1, ...]) -> [(transport, GPU), or the text of the error, of each rank]."""
    of_thread = threading.local()
    launch = SimpleNamespace(
        interpreted=lambda: of_thread.host.gpus == "interpreter",
        array_module=lambda: of_thread.host.array_module(),
        open_gpu=lambda cupy, device: cupy.cuda.Device(device).use(),
    )
    monkeypatch.setattr(nccl_communicator, "triton_launch", launch)
    monkeypatch.setattr(nccl_communicator, "platform", SimpleNamespace(node=lambda: of_thread.host.name))
    monkeypatch.setattr(nccl_communicator, "import_nccl", lambda cupy: None)
    monkeypatch.setattr(nccl_communicator, "watch_gpus", lambda world: None)

    def run(hosts):
        places = [(f"host{i}", gpus, local) for i, (ranks, gpus) in enumerate(hosts) for local in range(ranks)]

        def rank(threads):
            name, gpus, threads.local_rank = places[threads.rank]
            of_thread.host = Host(name, gpus)
            world = NcclCommunicator(threads)
            try:
                transport = world.use_transport(None)
            except UserError as error:
                assert error.shared
                return str(error)
            assert world.gpu.device_id == of_thread.host.current
            return transport, world.gpu.device_id

        return run_ranks(len(places), rank)

    return run


@pytest.mark.parametrize(
    "hosts, gpus", [([(2, 2), (2, 2)], [0, 1, 0, 1]), ([(3, 4), (1, 1)], [0, 1, 2, 0]), ([(1, 1)] * 3, [0, 0, 0])]
)
def test_a_rank_uses_the_gpu_of_its_number_on_its_host(on_hosts, hosts, gpus):
    assert on_hosts(hosts) == [("nccl", gpu) for gpu in gpus]


def test_a_host_with_fewer_gpus_than_ranks_is_named(on_hosts):
    with pytest.warns(UserWarning, match="^host1 has 1 GPU for 2 ranks, so ranks share GPUs.* using `transport=mpi`$"):
        assert on_hosts([(2, 2), (2, 1)]) == [("mpi", gpu) for gpu in (0, 1, 0, 0)]


@pytest.mark.parametrize(
    "hosts, at_fault, words",
    [
        ([(2, 2), (2, 0)], 2, "host host1: no GPU was found: advice; or start no ranks on this host"),
        ([(1, 0), (1, 1)], 0, "host host0: no GPU was found: advice; or start no ranks on this host"),
        (
            [(1, 1), (1, "interpreter")],
            None,
            "rank 1 uses Triton's interpreter (on host1), but rank 0 a GPU (on host0): set TRITON_INTERPRET for all "
            "ranks or for none, with Open MPI by mpirun -x TRITON_INTERPRET",
        ),
        (
            [(1, "interpreter"), (1, 1)],
            None,
            "rank 0 uses Triton's interpreter (on host0), but rank 1 a GPU (on host1): set TRITON_INTERPRET for all "
            "ranks or for none, with Open MPI by mpirun -x TRITON_INTERPRET",
        ),
    ],
)
def test_every_rank_raises_one_error_that_names_the_host_without_gpu(on_hosts, hosts, at_fault, words):
    for rank, message in enumerate(on_hosts(hosts)):
        assert message == (words if at_fault in (None, rank) else f"rank {at_fault}: {words}")


@pytest.mark.parametrize("version, wheel", [(12080, "nvidia-nccl-cu12"), (13000, "nvidia-nccl-cu13")])
def test_a_missing_nccl_names_the_package_for_the_cuda_version(monkeypatch, version, wheel):
    """CuPy warns and continues if its NCCL is missing or for another CUDA version."""
    cuda = ModuleType("cupy.cuda")
    cuda.runtime = SimpleNamespace(runtimeGetVersion=lambda: version)

    def nccl(name):
        warnings.warn("libnccl.so.2: cannot open shared object file\nand more", stacklevel=1)
        return SimpleNamespace(available=False)

    cuda.__getattr__ = nccl
    cupy = ModuleType("cupy")
    cupy.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    words = f"CuPy finds no NCCL (libnccl.so.2: cannot open shared object file); pip install {wheel}, or use `transport"
    with pytest.raises(ConfigError, match=re.escape(words)):
        nccl_communicator.import_nccl(cupy)


# -- training steps with threads as ranks ------------------------------------------------------------------------------

REST = [name for name in SCHEDULES if name != "interleaved"]  # it sends in both directions between F actions
MODEL = GPT2Config(vocab_size=24, block_size=8, n_layer=1, n_head=2, n_embd=16, tied=False)
RECIPE = dict(clip=0.5, weight_decay=0.1)


def trained(world, backend, micro_batches, steps=1, model=MODEL, dropout=0.0, **parallel):
    """[(loss, gradient norm, hash of the parameters after the step) of each step]."""
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, 200)
    sizes = dict(batch_size=4, seq_len=MODEL.block_size, micro_batches=micro_batches)
    sharing = ParallelConfig(bucket_mb=0.01, **parallel)
    options = dict(optimizer=RECIPE, world=world, parallel=sharing, dropout=dropout)
    trainer = Trainer(model, [backend()], **sizes, **options)
    windows, rows = Windows(tokens, MODEL.block_size), []
    for _ in range(steps):
        step = trainer.step(read_batch(trainer, windows), 1e-3)
        rows.append((step.loss, step.grad_norm, parameter_hash(trainer)))
    return rows


@pytest.fixture(scope="module")
def serial():
    """Two steps of stage 2 with four micro-batches."""
    return trained(None, CudaBackend, 4, steps=2)


def assert_near(rows, wanted, loss, norm):
    for got, want in zip(rows, wanted, strict=False):
        assert got[:2] == (pytest.approx(want[0], rel=loss), pytest.approx(want[1], rel=norm))


def test_stage_2_equals_stage_0_within_rounding(serial):
    assert_near(trained(None, NumpyBackend, 4, steps=2), serial, loss=1e-5, norm=1e-5)  # fp32 sums in another order


@pytest.mark.fast("2-{'dp': 'flat'}")
@pytest.mark.parametrize("ranks, how", [
    (2, dict(dp="flat")), pytest.param(4, dict(dp="overlap"), marks=pytest.mark.long), (4, dict(zero=1)),
], ids=str)  # fmt: skip
def test_ranks_have_stage_2_s_bits(serial, ranks, how):
    for got in run_ranks(ranks, lambda world: trained(world, CudaBackend, 4, **how)):
        assert got == serial[:1]


class UnequalFloat32:
    """A float32 for NumPy's functions, but unequal to it, so that the trainer allocates a copy for the kernels."""

    dtype = np.dtype(np.float32)

    def __ne__(self, other):
        return True


class Copied(CudaBackend):
    """Kernels read a copy of the parameters, as with bf16 on a GPU, but in fp32: the interpreter has no bf16."""

    def __init__(self):
        super().__init__()
        self.compute_dtype = UnequalFloat32()


def test_the_trainer_allocates_a_copy_for_this_backend():
    sizes = dict(batch_size=4, seq_len=MODEL.block_size, micro_batches=4)
    trainer = Trainer(MODEL, [Copied()], **sizes, optimizer=RECIPE)
    assert trainer.compute_parameters is not trainer.parameters and trainer.compute_parameters.dtype == np.float32


def test_zero_gathers_only_the_compute_copy_and_the_parameters_on_demand(serial):
    for got in run_ranks(2, lambda world: trained(world, Copied, 4, steps=2, dp="bucket", zero=1)):
        assert got == serial


def test_training_with_a_fake_nccl_has_stage_2_s_bits(serial):
    """The fake checks addresses, counts and peers, and that events are recorded before a stream waits for them."""
    how = dict(dp="bucket", zero=1, zero_gather="forward")
    for got in run_ranks(2, lambda threads: trained(OnFakeGpu(threads), Copied, 4, steps=2, **how)):
        assert got == serial


@pytest.mark.parametrize("how", [dict(), dict(dp="bucket", zero=1)], ids=str)
def test_rows_of_the_embedding_have_the_bits_of_the_whole_table(serial, how):
    """On ranks with a fake NCCL too: the rows are selected, gathered and added on the device."""
    for group in (lambda threads: threads, OnFakeGpu):
        for got in run_ranks(2, lambda threads, of=group: trained(
            of(threads), Copied, 4, steps=2, sparse_embedding=True, **how
        )):  # fmt: skip
            assert got == serial


@pytest.mark.parametrize("how", [dict(pp=2), *(pytest.param(each, marks=pytest.mark.long) for each in (
    dict(zero=3), dict(dp="bucket", recompute="block", zero=1), dict(pp=2, zero=3)
))], ids=str)  # fmt: skip
def test_dropout_has_stage_2_s_bits_on_several_ranks(how):
    model = replace(MODEL, n_layer=2, tied=True)
    want = trained(None, Copied, 2, steps=2, model=model, dropout=0.2)
    assert want[0][0] != trained(None, Copied, 2, steps=1, model=model)[0][0]
    how = dict(how, steps=2, model=model, dropout=0.2)
    for got in run_ranks(2, lambda threads: trained(OnFakeGpu(threads), Copied, 2, **how)):
        assert got == want


@pytest.mark.parametrize("schedule", ["interleaved", *(pytest.param(name, marks=pytest.mark.long) for name in REST)])
def test_a_pipeline_with_a_fake_nccl_has_stage_2_s_bits(schedule):
    model = replace(MODEL, n_layer=4, tied=True)
    want = trained(None, Copied, 2, model=model)
    how = dict(model=model, pp=2, pp_schedule=schedule)
    for got in run_ranks(2, lambda threads: trained(OnFakeGpu(threads), Copied, 2, **how)):
        assert got == want


def test_tensor_parallel_ranks_have_stage_2_s_losses(serial):
    for rows in run_ranks(2, lambda world: trained(world, CudaBackend, 1, tp=2)):
        assert_near(rows, serial, loss=1e-5, norm=1e-4)  # products are summed in another order


def test_tensor_parallel_ranks_divide_an_odd_vocabulary():
    model = replace(MODEL, vocab_size=MODEL.vocab_size + 1, tied=True)  # 13 and 12 tokens
    want = trained(None, CudaBackend, 1, model=model)
    for rows in run_ranks(2, lambda world: trained(world, CudaBackend, 1, model=model, tp=2)):
        assert_near(rows, want, loss=1e-5, norm=1e-4)


def test_gradients_compressed_to_bf16_change_only_the_norm(serial):
    for rows in run_ranks(2, lambda world: trained(world, CudaBackend, 2, compress="bf16")):
        assert_near(rows, serial, loss=1e-5, norm=1e-2)  # bf16 gradients have 8 bits; the loss is computed before


# -- the scripts, under mpiexec ----------------------------------------------------------------------------------------

FLAGS = ("--preset", "nano", "--n-layer", 1, "--block-size", 8, "--batch-size", 2, "--steps", 2, "--sample", 0)


@pytest.fixture(scope="module")
def mpi_is_here():
    mpiexec()  # or skip


@pytest.fixture(scope="module")
def corpus(corpus, tmp_path_factory):
    """The corpus with one more word, for an even vocabulary, which two tensor-parallel ranks can divide."""
    path = tmp_path_factory.mktemp("even") / "corpus.txt"
    path.write_text(corpus.read_text(encoding="utf-8") + " indeed", encoding="utf-8")
    return path


@pytest.fixture
def stage3(mpi_is_here, corpus):
    """stage3(ranks, *flags, name=...) -> Done of the script, in the interpreter."""

    def run(ranks, *flags, name="train_gpt2.py"):
        flags = unsaved((*FLAGS, "--data", corpus, *flags)) if name == "train_gpt2.py" else flags
        return mpi("-n", ranks, sys.executable, name, *flags, cwd=ROOT / "stage3_mpi_cuda", TRITON_INTERPRET="1")

    return run


def log_of(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["loss"], row["grad_norm"], row.get("parameters_sha256")) for row in rows]


def succeeded(done):
    assert (done.code, done.err, done.left) == (0, "", ()), done.out[-2000:] + done.err
    return done


def test_the_script_has_stage_2_s_bits_on_two_ranks_and_any_stage_reads_its_checkpoint(
    stage3, train, train2, infer, corpus, tmp_path
):
    flags = ("--deterministic", "--verify-every", 1, "--dp", "bucket", "--bucket-mb", 0.01, "--zero", 1)
    done = succeeded(stage3(2, *flags, "--log", tmp_path / "ranks", "--out", tmp_path / "run"))
    assert "2 ranks: 2 data x 1 tensor parallel, --dp bucket, --collectives canonical" in done.out
    serial = (*FLAGS, "--data", corpus, "--log", tmp_path / "serial")
    assert train2(*serial, "--deterministic").code == 0
    assert log_of(tmp_path / "ranks") == log_of(tmp_path / "serial")
    assert train(*serial, "--threads", 1, "--overwrite").code == 0
    losses = [row[0] for row in log_of(tmp_path / "serial")]
    np.testing.assert_allclose([row[0] for row in log_of(tmp_path / "ranks")], losses, rtol=1e-5)

    ask = ("--weights", tmp_path / "run", "--prompt", "the model", "--max-new-tokens", 3)
    want = infer(*ask, "--threads", 1)
    assert want.code == 0 and succeeded(stage3(2, *ask, "--mode", "tensor", name="inference.py")).out == want.out


@pytest.mark.long
def test_two_ranks_continue_prompts_as_stage_0_does(stage3, train, infer, corpus, tmp_path):
    assert train(*FLAGS, "--data", corpus, "--threads", 1, "--out", tmp_path / "run").code == 0
    (tmp_path / "prompts").write_text("the model\nit learns\n")
    prompts = ("--mode", "batch", "--prompts", tmp_path / "prompts", "--max-new-tokens", 2)
    done = succeeded(stage3(2, "--weights", tmp_path / "run", *prompts, name="inference.py"))
    assert done.out == infer("--weights", tmp_path / "run", *prompts, "--threads", 1).out
    assert done.out.count("Continuation:") == 2


MISTAKES = [
    ("--transport nccl", "--transport nccl: needs GPUs, and Triton's interpreter uses none; omit the flag"),
    ("--collectives nccl", "--collectives nccl: needs --transport nccl, which needs a GPU for each rank, but the "),
    ("--collectives x", "--collectives x: unknown algorithm; choose one of mpi, "),
    ("--precision bf16", "--precision bf16 cannot be used in Triton's interpreter"),
    ("--tp 3", "--tp 3 does not divide 2 ranks"),
    ("--batch-size 3", "--batch-size 3 is not divisible by 2 ranks: use --batch-size 4"),
    ("--zero-gather forward", "--zero-gather forward needs --zero 1, and this is --zero 0"),
]


SHORT = "--transport nccl", "--precision bf16"  # the others are long; most are in misuse/ranks.toml, for stage 1


@pytest.mark.parametrize("flags, words", [
    pytest.param(*row, id=row[0], marks=[] if row[0] in SHORT else pytest.mark.long) for row in MISTAKES
])  # fmt: skip
def test_a_mistake_is_one_error_line(stage3, flags, words):
    done = stage3(2, *flags.split())
    assert (done.code, done.out, done.left) == (2, "", ())
    assert words in done.err and done.err.startswith("error: ") and done.err.count("\n") == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_a_transport_is_for_many_ranks(train, train2, infer, infer2, stage):
    for run, flags in (((train, train2)[stage // 2], ("--preset", "nano")), ((infer, infer2)[stage // 2], ())):
        result = run(*flags, "--transport", "nccl")
        assert result.code == 2 and "--transport nccl" in result.err and result.err.count("\n") == 1


def test_without_a_gpu_the_error_names_the_interpreter_once(mpi_is_here):
    words = ("-n", 2, sys.executable, "train_gpt2.py", *FLAGS, "--no-save")
    done = mpi(*words, cwd=ROOT / "stage3_mpi_cuda", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert done.code == 2 and "TRITON_INTERPRET=1" in done.err and done.err.count("\n") == 1, done.err


class Link:
    """An NCCL communicator that has only check_async_error."""

    def __init__(self, answer):
        self.answer = answer

    def check_async_error(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def watchdog_of_links(links, codes):
    """A watchdog of rank 0 that checks NCCL; it appends the exit code to `codes` instead of aborting."""
    processes = SimpleNamespace(abort_code=lambda: None, set_state=lambda state: None)
    found = watchdog.Watchdog(0, processes, codes.append)
    found.add(NcclErrors(links))
    return found


@pytest.mark.parametrize(
    "answer, fails",
    [(None, False), (0, False), (7, False), (KeyError(7), False), (KeyError(6), True), (RuntimeError("lost"), True)],
)
def test_the_watchdog_aborts_on_an_nccl_error_but_not_in_progress(capsys, answer, fails):
    codes = []
    watchdog_of_links([Link(None), Link(answer)], codes).check()
    assert codes == [1] * fails
    assert capsys.readouterr().err.startswith("error: rank 0: NCCL has failed" * fails)


def test_the_watchdog_aborts_even_if_stderr_is_closed(monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(watchdog.sys, "stderr", SimpleNamespace(write=closed, flush=closed))
    codes = []
    watchdog_of_links([Link(RuntimeError("lost"))], codes).check()
    assert codes == [1]


FULL = """
from gpt2core.app.cli import train
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.cuda_runtime import InterpreterRuntime
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

original = Trainer.begin

def begin(self, batch, lr):
    if self.world.rank == 1 and self.steps == 1:
        raise MemoryError("cudaErrorMemoryAllocation: out of memory")
    return original(self, batch, lr)

Trainer.begin = begin
InterpreterRuntime.explain_oom = lambda self, error, *sizes, **options: "out of memory on the GPU: use --batch-size 1"
train(stage=3, backend=CudaBackend, world=NcclCommunicator)
"""


def test_a_rank_out_of_gpu_memory_ends_the_job_and_is_named(mpi_is_here, corpus):
    done = mpi("-n", 2, sys.executable, "-c", FULL, *FLAGS, "--no-save", "--data", corpus, TRITON_INTERPRET="1")
    assert done.code == 2 and not done.left
    assert done.err.count("error: rank 1: out of memory on the GPU: use --batch-size 1\n") == 1, done.err


STUCK = """
import ctypes, os, signal
from gpt2core.app.cli import train
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from stage2_cuda.cuda_backend import CudaBackend
from stage1_mpi import watchdog
from stage3_mpi_cuda import watchdog as gpu_watchdog
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

watchdog.PERIOD, gpu_watchdog.SILENCE, original = 0.2, 4.0, Trainer.begin

def begin(self, batch, lr):
    if self.world.rank == 1 and self.steps == 1:
        os.kill(os.getpid(), signal.{signal})
    return original(self, batch, lr)

Trainer.begin = begin
libc = ctypes.CDLL(None)  # exit() hangs, as with CUDA, which waits for an NCCL kernel that waits for a rank
getattr(libc, "__cxa_atexit")(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)
train(stage=3, backend=CudaBackend, world=NcclCommunicator)
"""


@pytest.mark.parametrize("name, cause", [
    pytest.param("SIGSTOP", "rank 1 has sent no heartbeat for 4 s", marks=pytest.mark.long), ("SIGKILL", ""),
])  # fmt: skip
def test_a_rank_that_is_stopped_or_killed_ends_the_job(mpi_is_here, corpus, name, cause):
    code = (sys.executable, "-c", STUCK.format(signal=name), *FLAGS, "--no-save", "--data", corpus)
    done = mpi("-n", 2, *code, TRITON_INTERPRET="1")
    assert done.code not in (0, None) and not done.left
    assert cause in done.err and done.err.count("error: rank 0: ") == bool(cause), done.err
