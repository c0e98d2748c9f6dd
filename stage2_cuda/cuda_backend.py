"""The kernels on a GPU: Triton for all that is ours to fuse, cublasLt for the large products, CuPy for memory."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows

import contextlib
import functools

import numpy as np

from gpt2core.arena import BLOCK as ARENA_BLOCK
from gpt2core.backend import Backend, Immediate
from gpt2core.communicator import address
from gpt2core.errors import ConfigError
from gpt2core.model import parameter_count
from stage2_cuda import memory_model as memory
from stage2_cuda.decoding.batched import MAX_BATCH, tiling_for
from stage2_cuda.decoding.cached_attention import attention_cached
from stage2_cuda.decoding.decode_stream import DecodeStream, EagerStream
from stage2_cuda.decoding.decoder import GpuDecoder, supports
from stage2_cuda.fused_head import FusedHead, rows
from stage2_cuda.gemm.products import NumpyGemm, Products, cublaslt
from stage2_cuda.kernels import adamw, column_sums, embedding, gelu, layernorm, rounding
from stage2_cuda.kernels import attention as flash
from stage2_cuda.kernels.cast import cast
from stage2_cuda.runtime import nvtx, triton_launch
from stage2_cuda.runtime.cuda_graph import Recorded
from stage2_cuda.runtime.peak_flops import peak_flops
from stage2_cuda.runtime.side_stream import NoStream, SideStream
from stage2_cuda.runtime.static_inputs import Mailbox, lasting
from stage2_cuda.tuning import attention_tiles
from stage2_cuda.tuning.tuner import Tuner

# --precision: the type of activations and of the parameters that kernels read, and what tl.dot makes of fp32 operands;
# three passes of tf32 keep the bounds of fp32, and are faster
PRECISIONS = {
    "fp32": ("float32", "tf32x3"),
    "tf32": ("float32", "tf32"),
    "bf16": ("bfloat16", "ieee"),
    "fp16": ("float16", "ieee"),
}
LARGE = 1_000_000  # parameters of a model that the interpreter takes too long for
INTERPRETED = "fp32", "fp16"  # what Triton's interpreter computes rightly; tf32 would be fp32 there


class CudaBackend(FusedHead, Backend):
    """CuPy arrays on one GPU; under TRITON_INTERPRET=1 NumPy arrays, the same kernels, and NumPy's matrix products."""

    deterministic = False
    uses_threads = False
    decoder_batch = MAX_BATCH
    many_ranks = "stage 3"
    decode_tiling = staticmethod(tiling_for)  # of the decode kernels, for a batch size

    def __init__(self, precision="fp32", deterministic=True):
        if precision not in PRECISIONS:
            raise ConfigError(f"--precision {precision} is unknown in this stage: use {', '.join(PRECISIONS)}")
        if triton_launch.interpreted() and precision not in INTERPRETED:
            why = ", where it is silently wrong" if precision == "bf16" else ", which has no tensor cores"
            raise ConfigError(f"--precision {precision} has no meaning in Triton's interpreter{why}: use fp32 or fp16")
        self.xp = triton_launch.array_module()
        compute, self.dot = PRECISIONS[precision]
        self.precision, self.dtype, self.compute = precision, np.dtype(np.float32), dtype_of(compute)
        self.scales_loss, self.rounds_stochastically = precision == "fp16", precision == "bf16"
        self.records, self.recorded = not triton_launch.interpreted(), []
        if triton_launch.interpreted():
            self.name, self.side = "the Triton interpreter", NoStream()
            gemm, self.tuner = NumpyGemm(), Tuner(self.xp)
        else:
            self.name, self.side = gpu_name(self.xp), SideStream(self.xp)
            tell = lambda text: self.say(text)  # noqa: E731 - which the command may yet redirect
            gemm, self.tuner = cublaslt(self.xp, self.name, deterministic, self.side.stream, tell)
        self.products = Products(self.xp, precision, gemm)
        self.mailbox, self.one = Mailbox(self.xp), self.xp.ones((), np.float64)
        self.runs, self.decays = {}, {}  # what has to stay where it is: see compile_step
        self.places, self.filled = {}, set()  # of gradients: see place_gradients

    # -- arrays ------------------------------------------------------------------------------------------------------

    def empty(self, shape, dtype):
        return self.xp.empty(shape, dtype)

    def asarray(self, array, dtype=None):
        return self.xp.asarray(array, dtype)

    def to_host(self, array):
        if isinstance(array, self.xp.ndarray) and self.xp is not np:
            self.wait()
            array = array.get()
        host = np.asarray(array)
        return host.astype(np.float32) if host.dtype.name == "bfloat16" else host  # NumPy knows no such type

    def like(self, array):
        return self.xp.empty(array.shape, array.dtype)

    def floats(self, *shape):
        """Uninitialised float32: statistics, sums and scratch, in every precision."""
        return self.xp.empty(shape, np.float32)

    def ones(self, shape, dtype):
        return self.one if (shape, dtype) == ((), self.one.dtype) else super().ones(shape, dtype)

    def product(self, a, b, **options):
        """a @ b (N, K), with transposes, bias and the rest as cublaslt.matmul has them."""
        n = a.shape[1] if options.get("trans_a") else a.shape[0]
        k = b.shape[0] if options.get("trans_b") else b.shape[1]
        out = self.xp.empty((n, k), options.pop("dtype", a.dtype))
        self.products.multiply(out, a, b, **options)
        return out

    # -- gradients of parameters --------------------------------------------------------------------------------------

    def place_gradients(self, places):
        self.places = {address(parameter): place for parameter, place in places}

    def gradients(self, parameters, shape, compute, *operands):
        """[the gradient of each parameter], float32 of `shape`, which compute(*gradients) writes from `operands`.

        Where they have places, those are filled, and beside all that follows: settle() waits for it. A parameter that
        is not at hand is True, and one that is not there None, as is its gradient then.
        """
        places = [self.place(parameter) for parameter in parameters if parameter is not None]
        placed = all(place is not None for place in places)
        given = iter(places if placed else [self.floats(*shape) for _ in places])
        results = [None if parameter is None else next(given) for parameter in parameters]
        with self.side.beside(*operands) if placed else contextlib.nullcontext():
            compute(*results)
        return results

    def place(self, parameter):
        """The array that place_gradients() has for this parameter, or None."""
        return None if parameter is True else self.places.get(address(parameter))

    def weight_gradient(self, w, x, dy):
        """x' dy (C, K), x (N, C), dy (N, K)."""
        return self.gradients([w], w.shape, lambda dw: self.products.multiply(dw, x, dy, trans_a=True), x, dy)[0]

    def bias_gradient(self, b, dy):
        """The sums over the rows of dy (N, K); b: the bias, or True."""

        def compute(db):
            column_sums.column_sums(db, self.floats(*column_sums.partials_shape(*dy.shape)), dy)

        return self.gradients([b], dy.shape[1:], compute, dy)[0]

    def settle(self):
        self.side.settle()

    def behind_gradients(self):
        return self.side.behind()

    # -- linear ------------------------------------------------------------------------------------------------------

    def linear_forward(self, x, w, b=None):
        return self.product(rows(x), w, bias=b).reshape(*x.shape[:-1], w.shape[1])

    def linear_backward(self, dy, x, w, bias=True):
        operand = self.products.operand(rows(dy))
        dw = self.weight_gradient(w, rows(x), operand)
        db = () if bias is False else (self.bias_gradient(bias, rows(dy)),)
        return self.product(operand, w, trans_b=True).reshape(x.shape), dw, *db

    # -- gelu --------------------------------------------------------------------------------------------------------

    def gelu_forward(self, x):
        y = self.like(x)
        gelu.gelu_forward(rows(y), rows(x))
        return y

    def gelu_backward(self, dy, x):
        dx = self.like(x)
        gelu.gelu_backward(rows(dx), rows(self.xp.ascontiguousarray(dy)), rows(x))
        return dx

    def linear_gelu_forward(self, x, w, b):
        h = self.product(rows(x), w)  # without its bias, which the next kernel adds
        y = self.like(h)
        gelu.bias_gelu_forward(y, h, b)
        return y.reshape(*x.shape[:-1], w.shape[1]), (h, b)

    def linear_gelu_backward(self, dy, x, w, aux):
        h, b = aux
        dh = self.like(h)
        partials = self.floats(*gelu.gelu_partials_shape(*h.shape))
        gelu.bias_gelu_backward(dh, partials, rows(dy), h, b)
        db = self.gradients([b], b.shape, lambda db: column_sums.add_partials(partials, db), partials)
        return *self.linear_backward(dh, x, w, bias=False), *db

    def mlp_forward(self, x, w, b, w2):
        shape = x.size // x.shape[-1], w.shape[1]
        if not self.products.fuses_gelu(*shape):
            return super().mlp_forward(x, w, b, w2)
        h, y = self.xp.empty(shape, x.dtype), self.xp.empty(shape, x.dtype)
        self.products.multiply(y, rows(x), w, bias=b, activation="gelu", aux=h)
        return self.product(y, w2).reshape(*x.shape[:-1], w2.shape[1]), (h, y, b)

    def mlp_backward(self, dy, x, w, w2, aux):
        if not self.products.fuses_gelu(x.size // x.shape[-1], w.shape[1]):
            return super().mlp_backward(dy, x, w, w2, aux)
        (h, y, b), dy = aux, rows(dy)
        dh = self.like(h)
        self.products.multiply(dh, dy, w2, trans_b=True, activation="dgelu", aux=h)
        dw2 = self.weight_gradient(w2, y, dy)
        return *self.linear_backward(dh, x, w, bias=b), dw2

    # -- layernorm ---------------------------------------------------------------------------------------------------

    def layernorm_forward(self, x, w, b, eps):
        _, y, aux = self.residual_layernorm_forward(x, None, None, w, b, eps)
        return y, aux

    def layernorm_backward(self, dy, w, aux):
        dx, _, dw, db = self.residual_layernorm_backward(None, dy, w, aux)
        return dx, dw, db

    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        x2 = rows(self.xp.ascontiguousarray(x))
        y, mean, rstd = self.like(x2), self.floats(len(x2)), self.floats(len(x2))
        s = x2 if a is None else self.like(x2)
        a2 = None if a is None else rows(self.xp.ascontiguousarray(a))
        layernorm.residual_layernorm_forward(
            None if a is None else s, y, mean, rstd, x2, a2, a_bias, w, b, eps
        )  # fmt: skip
        return s.reshape(x.shape), y.reshape(x.shape), (s, mean, rstd, a_bias, b)

    def residual_layernorm_backward(self, ds, dy, w, aux):
        s, mean, rstd, a_bias, b = aux
        dx, partials = self.like(s), self.floats(*layernorm.layernorm_partials_shape(*s.shape))
        ds = None if ds is None else rows(self.xp.ascontiguousarray(ds))
        layernorm.residual_layernorm_backward(dx, partials, ds, rows(dy), s, w, mean, rstd)
        dw, db, da_bias = self.gradients(
            [w, b, a_bias], w.shape, lambda *sums: column_sums.add_partials(partials, *sums), partials
        )
        return dx.reshape(dy.shape), da_bias, dw, db

    # -- attention ---------------------------------------------------------------------------------------------------

    def attention_forward(self, qkv, n_head):
        B, T, C3 = qkv.shape
        y, lse = self.xp.empty((B, T, C3 // 3), qkv.dtype), self.floats(B, n_head, T)

        def run(config):
            flash.attention_forward(y, lse, qkv, n_head, self.dot, config)

        run(attention_tiles.tuned_forward(self.tuner, run, y, lse, qkv, n_head, self.dot))
        return y, lse

    def attention_backward(self, dy, qkv, y, aux, n_head):
        dqkv, delta, dy = self.like(qkv), self.like(aux), self.xp.ascontiguousarray(dy)

        def run(config, dy=y):  # y where it is tried out: as large as dy, and finite whatever the loss scale
            flash.attention_backward(dqkv, delta, dy, qkv, y, aux, n_head, self.dot, config)

        run(attention_tiles.tuned_backward(self.tuner, run, dqkv, delta, qkv, n_head, self.dot), dy)
        return dqkv

    def attention_cached(self, qkv, keys, values, position, n_head):
        B, t, C3 = qkv.shape
        y = self.xp.empty((B, t, C3 // 3), qkv.dtype)
        attention_cached(y, qkv, keys, values, position, n_head)
        return y

    # -- embedding ---------------------------------------------------------------------------------------------------

    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        ids = self.asarray(ids, np.int32)
        y = self.xp.empty((*ids.shape, wte.shape[1]), wte.dtype)
        embedding.embedding_forward(y, ids, wte, wpe, position, first)
        return y

    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0):
        ids, dy = self.asarray(ids, np.int32), self.xp.ascontiguousarray(dy)
        dwte, dwpe = self.space(wte), self.space(wpe)
        shared = address(wte) in self.filled  # the same matrix at the other end has left its gradient there
        self.filled.clear()
        pieces = self.floats(*embedding.pieces_shape(ids.size, wte.shape[1]))
        runs = self.sorted_rows(ids, wte.shape[0], first)
        embedding.embedding_backward(dwte, dwpe, pieces, runs, dy, position, accumulate=shared)
        return None if shared else dwte, dwpe

    def space(self, parameter):
        """The place of a parameter's gradient, or new memory."""
        place = self.place(parameter)
        return self.floats(*parameter.shape) if place is None else place

    # -- flat buffers ------------------------------------------------------------------------------------------------

    def sum_of_squares(self, flat, segments):
        out = self.xp.empty(segments, np.float64)
        adamw.sum_of_squares(out, self.floats(flat.size // ARENA_BLOCK), flat)
        return out

    def clip(self, squares, bound, loss_scale=None, interval=0, stop=None):
        norm, scale = self.floats(1), self.floats(1)
        adamw.clip_scale(scale, norm, squares, bound, loss_scale, interval, stop)
        return norm, scale

    def adamw_rates(self, step, lr, beta1, beta2, eps, weight_decay, seed=None):
        scalars = self.mailbox.put("rates", adamw.adamw_scalars(step, lr, beta1, beta2, eps, weight_decay))
        return scalars, beta1, beta2, None if seed is None else self.mailbox.put("key", rounding.key_of(seed, step))

    def adamw_step(self, p, m, v, copy, g, rates, scale, runs, offset=0):
        scalars, beta1, beta2, key = rates
        if (flags := tuple((run.start, run.stop, decays) for run, decays in runs)) not in self.decays:
            blocks = np.zeros(p.size // ARENA_BLOCK, np.int32)
            for start, stop, decays in flags:
                blocks[start // ARENA_BLOCK : stop // ARENA_BLOCK] = decays
            with lasting(self.xp):
                self.decays[flags] = self.asarray(blocks)
        random = () if key is None else (key, offset)
        copy = copy if key is None else copy.view(np.uint16)
        adamw.adamw_step(p, m, v, copy, g, scalars, scale, self.decays[flags], beta1, beta2, *random)

    # -- what is chosen by timing --------------------------------------------------------------------------------------

    @property
    def choices(self):
        return self.tuner.tuned

    @property
    def chosen_for(self):
        return self.tuner.tuned_for

    def adopt(self, choices, final=False):
        if self.tuner.load_tuned(choices, final):
            self.products.gemm.plan_anew()

    def choose_anew(self):
        if not self.records:
            return super().choose_anew()
        if self.chosen_for is None:
            raise ConfigError("--autotune and --deterministic exclude each other: that mode chooses nothing by timing")
        self.tuner.retune()

    # -- a step that is recorded ---------------------------------------------------------------------------------------

    def tokens(self, array, slot):
        place = self.mailbox.put(slot, np.ascontiguousarray(array, np.int32))
        for own, count, first in self.runs:
            if own == slot:
                self.runs[own, count, first] = self.put_runs(own, place, count, first)
        return place

    def sorted_rows(self, ids, count, first):
        """The Runs of ids (B, T), for embedding_backward; those of tokens() stay in one place, and come with them."""
        slot, _ = self.mailbox.host(ids)
        if slot is None:
            return embedding.Runs(*map(self.asarray, embedding.runs_of_tokens(self.to_host(ids), count, first)))
        if (slot, count, first) not in self.runs:
            self.runs[slot, count, first] = self.put_runs(slot, ids, count, first)
            self.mailbox.send()
        return self.runs[slot, count, first]

    def put_runs(self, slot, place, count, first):
        runs = embedding.runs_of_tokens(self.mailbox.host(place)[1], count, first)
        names = ((slot, count, first, field) for field in runs._fields)
        return embedding.Runs(*map(self.mailbox.put, names, runs))

    def compute_copy(self, parameters):
        if self.compute == self.dtype:
            return parameters
        return self.zeros(parameters.shape, self.compute)

    def refresh(self, copy, parameters, drawn=None):
        if drawn is not None:
            rounding.round_to_bf16(copy.view(np.uint16), parameters, self.asarray(rounding.key_of(*drawn)))
        elif copy is not parameters:
            cast(copy, parameters)

    def compile_step(self, function, record=True):
        if not (record and self.records):
            return Immediate(lambda: (self.mailbox.send(), function())[1])
        self.recorded.append(Recorded(function, self.mailbox.send))
        return self.recorded[-1]

    def wait(self):
        """Return when the device has done all that it was given."""
        if self.records:
            self.xp.cuda.runtime.deviceSynchronize()

    # -- generation ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def decode_stream(self):
        """The stream of all generation; only one, because the products share a workspace."""
        return DecodeStream(self.xp) if self.records else EagerStream()

    def decoder(self, model, batch):
        if not supports(model, batch):
            return None
        return GpuDecoder(model, batch, self.decode_stream, self.decode_tiling(batch))

    def annotate(self):
        if not self.records:
            return super().annotate()
        nvtx.annotate(self, self.xp.cuda.nvtx)

    # -- memory --------------------------------------------------------------------------------------------------------

    def trim(self):
        if self.records:
            self.xp.get_default_memory_pool().free_all_blocks()

    def held_memory(self):
        """Bytes that CuPy's pools hold, what lies in them unused included; the context of CUDA is not in it."""
        others = [step.workspace for step in self.recorded]
        others += [self.decode_stream.workspace] if "decode_stream" in vars(self) else []
        pools = [self.xp.get_default_memory_pool(), *(workspace.pool for workspace in others)]
        return sum(pool.total_bytes() for pool in pools)

    def peak_memory(self):
        if not self.records:
            return None
        return max([self.held_memory(), *(step.held_before for step in self.recorded)])

    def out_of_memory(
        self, error, config, batch_size=None, seq_len=None, micro_batches=1, ranks=1, parallel=None, in_order=False
    ):
        if not (self.records and memory.is_out_of_memory(error)):
            return None
        free = self.xp.cuda.runtime.memGetInfo()[0] + self.held_memory() + memory.CONTEXT  # of others, that is
        if batch_size is None:
            told = memory.explain_generation_oom(config, self.precision, free, parallel.tp if parallel else 1)
        else:
            sizes = batch_size, seq_len, self.precision, micro_batches, ranks
            told = memory.explain_training_oom(config, *sizes, free, parallel, in_order)
        return f"out of memory on the {self.name}: {told}"

    def check_model(self, config):
        flash.check_head_size(config.n_embd, config.n_head)

    def remarks(self, config):
        if self.records or parameter_count(config) < LARGE:
            return []
        return ["note: Triton's interpreter takes minutes for a step of this size: it is meant for --preset nano"]

    def peak_flops(self, precision):
        return peak_flops(self.name, precision)


def dtype_of(name):
    """The NumPy dtype of this name; of bfloat16 it is ml_dtypes', which CuPy takes for its own."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def gpu_name(cupy):
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
