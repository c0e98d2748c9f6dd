"""PyTorch's program of gpu/decode.py: its variants generate the same tokens, and the search finds the fastest one."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.cpu import decode as cpu_decode  # noqa: E402
from benchmarks.gpu import decode  # noqa: E402
from benchmarks.harness import report, table_format, tables  # noqa: E402
from benchmarks.harness.result_tables import TABLES  # noqa: E402
from benchmarks.peers import torch_decode_cuda, torch_gpt2  # noqa: E402
from benchmarks.peers.torch_decode_cuda import ATTENTION, KINDS, PRODUCTS, CudaGenerator  # noqa: E402
from gpt2core.architecture import GPT2Config  # noqa: E402
from gpt2core.errors import UserError  # noqa: E402

V, BLOCK = 101, 24
CONFIG = GPT2Config(vocab_size=V, block_size=BLOCK, n_layer=2, n_head=2, n_embd=32, tied=False)
COMPILED = [("sdpa", "library"), ("matmul", "templates"), ("sums", "sums")]


def expected_tokens(model, prompts, new):
    """Greedy decoding in float64 without a cache: every token is computed from the last BLOCK tokens."""
    reference = torch_gpt2.TorchGPT2(model.config).to(next(model.parameters()).device, torch.float64)
    reference.load_state_dict(model.state_dict())
    ids = torch.from_numpy(prompts).to(reference.positions.device)
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat([ids, reference(ids[:, -BLOCK:])[:, -1:, :V].argmax(-1)], 1)
    return ids[:, prompts.shape[1] :].cpu().numpy()


def check_tokens(rng, batch, prompt_lengths, device="cpu", new=BLOCK, **options):
    """Compare with the reference for prompts that leave, fill and exceed the cache; weights whose tokens differ."""
    generate = CudaGenerator(CONFIG, batch, "fp32", device=device, **options)
    with torch.no_grad():
        for name, weight in generate.model.named_parameters():
            scale = 1.0 if name.startswith("w") else 0.3
            weight.copy_(torch.from_numpy(scale * rng.standard_normal(weight.shape)))
    for length in prompt_lengths:
        prompts = rng.integers(0, V, (batch, length))
        got, first, total = generate(prompts, new)
        # fp32 and float64 would differ only if two logits were equal up to 1e-6
        np.testing.assert_array_equal(got, expected_tokens(generate.model, prompts, new))
        assert 0 < first <= total


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("attention", ATTENTION)
def test_every_variant_of_pytorch_s_decoding_generates_the_tokens_of_a_model_without_a_cache(rng, attention, batch):
    for products in PRODUCTS if batch == 1 else ["library"]:  # one row: "sums" has another formula
        check_tokens(rng, batch, [rng.integers(1, BLOCK)], kind="eager", attention=attention, products=products, cut=8)
    check_tokens(rng, batch, [1, BLOCK], kind="eager", attention=attention, cut=0)


@pytest.mark.long
@pytest.mark.parametrize("attention, products", [("sdpa", "library"), ("sums", "sums")])
def test_compiled_variants_generate_the_same_tokens(rng, attention, products):
    check_tokens(rng, 1, [5], kind="compiled", attention=attention, products=products, cut=16)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "kind, attention, products", [("graph", *each) for each in COMPILED] + [("overhead", *COMPILED[0])]
)
def test_captured_variants_generate_the_same_tokens(rng, kind, attention, products, batch):
    check_tokens(rng, batch, [5, 5], "cuda", kind=kind, attention=attention, products=products, cut=16)


@pytest.mark.parametrize("batch, length", [(1, 5), (3, 7), (1, BLOCK)])
def test_the_programs_of_cpu_decode_generate_the_tokens_of_their_models(rng, batch, length):
    threads, prompts = torch.get_num_threads(), rng.integers(0, V, (batch, length))
    eager = torch_gpt2.make_generator(CONFIG, threads)
    assert eager(prompts, BLOCK, True)[0] == eager(prompts, BLOCK, False)[0]
    cached = torch_decode_cuda.make_generator(CONFIG, threads, "eager")
    ids, first, total = cached(prompts, BLOCK, use_cache=True)
    same_seed = CudaGenerator(CONFIG, batch, "fp32", "eager", device="cpu").model
    np.testing.assert_array_equal(ids, expected_tokens(same_seed, prompts, BLOCK))
    assert 0 < first <= total
    with pytest.raises(ValueError, match="use_cache=False"):
        cached(prompts, 1, use_cache=False)


def test_decoding_on_the_cpu_is_compared_with_the_fastest_program_of_pytorch_in_each_case():
    def result(name, case, seconds, **more):
        samples = {key: [seconds] * 3 for key in ("first", "token", "total", "cpu")}
        return {"name": name, "case": case, "threads": 1, "prompt": 2, "new": 4, "peak_bytes": 1, **samples, **more}

    seconds = {"ours": (1.0, 4.0, 6.0), "torch eager": (3.0, 8.0, 9.0), "torch compiled": (2.0, None, 12.0)}
    results = []
    for name, (cached, recomputing, batch) in seconds.items():
        results.append(result(name, "KV cache", cached))
        results += [result(name, "recomputing", recomputing)] * bool(recomputing)
        results.append(result(name, "batch of 8", batch, batch=8))
    cpu_decode.summarise(results)
    record = {"results": report.summarised(results)}
    cached, batch = TABLES["cpu-decode"].cells([record])
    assert (cached["1: times as fast"], batch["1: times as fast"]) == ("2.00", "1.50")
    assert (cached["1: torch compiled, ms"], cached["1: torch eager, ms"]) == ("2,000", "3,000")
    assert (cached["1: recomputing / cache"], batch["1: recomputing / cache"]) == ("4.0", "")


@pytest.mark.parametrize("past", [0, 4])
def test_the_last_position_and_the_cache_do_not_depend_on_whether_the_last_layer_computes_only_it(rng, past):
    model = torch_gpt2.TorchGPT2(CONFIG).double()
    ids = torch.from_numpy(rng.integers(0, V, (2, past + 1 if past else 9)))
    caches = [torch.zeros(2, 2, 2, 2, BLOCK, 16, dtype=torch.float64) for _ in range(2)]
    for cache, last_only in zip(caches, (True, False), strict=True):
        if past:
            model(ids[:, :past], cache, last_only=last_only)
        logits = model(ids[:, past:], cache, past, last_only)
        # float64: the products of one row and of many rows round differently
        torch.testing.assert_close(logits[:, -1:], model(ids)[:, -1:], rtol=0, atol=1e-12)
        assert logits.shape[1] == (1 if last_only or past else ids.shape[1])
    torch.testing.assert_close(*caches, rtol=0, atol=1e-12)


def test_an_unknown_variant_or_too_many_tokens_are_refused():
    for options in ({"kind": "fast"}, {"attention": "flash"}, {"products": "none"}):
        (name, value), *_ = options.items()
        with pytest.raises(ValueError, match=f"{name}='{value}': use one of"):
            CudaGenerator(CONFIG, 1, "fp32", **{"kind": "eager", "device": "cpu", **options})
    generate = CudaGenerator(CONFIG, 1, "fp32", "eager", device="cpu")
    for length, new in ((BLOCK + 1, 1), (1, BLOCK + 1), (1, 0)):
        with pytest.raises(ValueError, match=f"{length} prompt tokens and {new} new tokens: use 1 to {BLOCK}"):
            generate(np.zeros((1, length), np.int64), new)


# -- the search of gpu/decode.py ---------------------------------------------------------------------------------------


def test_the_search_keeps_the_fastest_value_of_each_option_and_lists_no_variant_twice(capsys):
    cost = {"sdpa": 9.0, "matmul": 5.0, "sums": 4.0, "library": 3.0, "templates": 1.0, 128: 2.0, 0: 7.0}
    calls = []

    def run(**variant):
        calls.append(tuple(variant.values()))
        if variant["attention"] == "matmul" or variant["products"] == "sums":
            return {"error": "no kernel for this GPU"}
        compiling = calls.count(calls[-1]) == 1  # the first round is not timed
        return {
            "token": 0.0 if compiling else 1e-6 * sum(cost[value] for value in variant.values()) + 1e-7 * len(calls)
        }

    start = {option: values[0] for option, values in decode.ONE_SEQUENCE_SEARCH.items()}
    best, tried = decode.search(run, decode.ONE_SEQUENCE_SEARCH, 3, start)
    assert best == {"attention": "sums", "products": "templates", "cut": 128}
    assert len({tuple(each[name] for name in best) for each in tried}) == len(tried) == 3 + 2 + 1
    assert [each.get("error") for each in tried].count("no kernel for this GPU") == 2
    assert calls.count(("templates", "sums", 128)) == 2 * (1 + 3)  # beside the other attentions, and the other cut
    assert "products: templates, attention: sums, cut: 128, us_per_token: " in capsys.readouterr().out
    with pytest.raises(UserError, match="no value of attention works: broken"):
        decode.search(lambda **_: {"error": "broken"}, decode.WINDOW_SEARCH, 1)


def test_options_are_a_variant_of_the_case():
    found = decode.variant_of(["cut=0", "products=sums"], decode.ONE_SEQUENCE_SEARCH)
    assert found == {"products": "sums", "attention": "sdpa", "cut": 0}
    with pytest.raises(UserError, match="--options cut=0: this case has {'attention': "):
        decode.variant_of(["cut=0"], decode.WINDOW_SEARCH)
    with pytest.raises(UserError, match="--options cut=0 cut=128: give each option once"):
        decode.variant_of(["cut=0", "cut=128"], decode.ONE_SEQUENCE_SEARCH)


def test_a_variant_that_fails_is_an_answer_and_a_program_that_fails_is_an_error():
    class Peer:
        def CudaGenerator(config, batch, precision, kind, attention="sdpa"):
            if attention == "sums":
                raise RuntimeError("unsupported\nlong explanation")
            return lambda prompts, new: (np.zeros((batch, new), np.int64), 1.0, 4.0)

    run_round = decode.prepare(Peer, "nano", 2, "fp32", kind="graph")
    assert run_round(prompt=3, new=4) == {"ids": [[0] * 4] * 2, "first": 1.0, "total": 4.0, "token": 1.0}
    assert run_round(prompt=3, new=4, attention="matmul")["token"] == 1.0
    assert run_round(prompt=3, new=4, attention="sums") == {"error": "unsupported"}
    with pytest.raises(RuntimeError, match="unsupported"):
        decode.prepare(Peer, "nano", 2, "fp32", kind="graph", attention="sums")(prompt=3, new=4)


def test_the_compiled_programs_use_the_variant_of_the_search_and_the_eager_one_its_own():
    from types import SimpleNamespace

    args = SimpleNamespace(threads=1, peers=["graph", "overhead", "eager"])
    variant = {"attention": "matmul", "products": "templates", "cut": 128}
    own, graph, overhead, eager = decode.process_specs(args, {"batch": 1}, variant)
    assert own.options == {"batch": 1} and set(decode.PEERS) == set(KINDS)
    assert graph.options == {"batch": 1, "kind": "graph", **variant} and overhead.options["attention"] == "matmul"
    assert eager.options == {"batch": 1, "kind": "eager", "attention": "sdpa", "products": "library", "cut": 128}


def test_the_headline_uses_pytorch_s_fastest_program_and_the_row_names_its_variant(monkeypatch):
    def result(name, seconds):
        return {
            "name": name, "case": "one", "preset": "gpt2", "precision": "bf16", "batch": 1, "prompt": 1, "new": 2,
            **dict.fromkeys(("first", "token", "total"), seconds),
        }  # fmt: skip

    graph, overhead = "torch compiled + each step a graph", "torch compiled, reduce-overhead"
    results = [result(name, [seconds] * 7) for name, seconds in (("ours", 1e-6), (graph, 3e-6), (overhead, 2e-6))]
    decode.summarise(results)
    real_load = table_format.load
    record = {"results": report.summarised(results), "machine": "B300", "name": "gpu/decode", "commit": "abc"}
    saved = json.loads(json.dumps(record), object_hook=table_format.Fields)
    monkeypatch.setattr(table_format, "load", lambda name: saved if name == "gpu/decode" else real_load(name))
    row = next(row for row in tables.headline()[0] if "generated token" in row[""])
    assert "bf16, one B300]" in row[""]
    assert (row["this project"], row["speedup"]) == ("1.000 us", "2.00")
    assert row["PyTorch"] == "2.000 us (compiled, reduce-overhead)"
    variant = {"attention": "sums", "products": "library", "cut": 128}
    assert decode.described(variant) == "attention: sums, products: library, cache cut to a multiple of 128"
    assert decode.described(variant | {"cut": None}) == "attention: sums, products: library"
