"""The tables of docs/RESULTS.md about torch_bridge.

Each function returns (rows, names of the source files in results/). A row is a dictionary {column title: cell}.
"""

from benchmarks.harness.table_format import load


def attention():
    rows = [
        {
            "": result["name"].removeprefix("leaderboard / "),
            "ms": f"{result['both']['mean']:.4g}",
            "standard deviation": f"{result['both']['std']:.2g}",
        }
        for result in load("torch/attention")["results"]
        if result["name"].startswith("leaderboard / ")
    ]
    return rows, ["torch/attention"]


def matmul():
    results = load("torch/matmul_search")["results"]
    comparisons = {
        int(result["name"].split(" /")[0]): result["ms"]
        for result in results
        if result["name"].endswith("/ comparison")
    }
    rows = [
        {
            "": name,
            "size": size,
            "us": f"{1e3 * ms['median']:.1f}",
            "time of this row / time of ours": f"{ms['median'] / times['ours']['median']:.2f}",
        }
        for size, times in sorted(comparisons.items())
        for name, ms in times.items()
    ]
    return rows, ["torch/matmul_search"]


def ddp():
    results = load("torch/ddp")["results"]
    (torch_ddp,) = (result["step"]["mean"] for result in results if result["way"] == "torch DDP")
    rows = [
        {
            "": result["way"],
            "messages": result["buckets"] or "",
            "ms per step": f"{result['step']['mean']:.1f}",
            "standard deviation": f"{result['step']['std']:.2g}",
            "time of this row / time of torch DDP": f"{result['step']['mean'] / torch_ddp:.2f}",
        }
        for result in results
    ]
    return rows, ["torch/ddp"]


def sharding():
    results = load("torch/sharding")["results"]
    names = {"plain": "`BucketedDDP`, AdamW", "sharded optimizer": "`ShardedOptimizer`", "fsdp": "`FSDP`"}
    (torch_peak,) = (result["peak GB"] for result in results if result["way"] == "fully_shard")
    rows = [
        {
            "": names.get(result["way"], f"torch `{result['way']}`"),
            "ms per step": f"{result['step']['mean']:.1f}",
            "standard deviation": f"{result['step']['std']:.2g}",
            "GB after the first step": f"{result['GB after step']:.2f}",
            "peak GB": f"{result['peak GB']:.2f}",
            "peak of this row / peak of fully_shard": f"{result['peak GB'] / torch_peak:.2f}",
            "last loss": f"{result['last loss']:.6f}",
        }
        for result in results
    ]
    return rows, ["torch/sharding"]


TABLES = {"torch-attention": attention, "torch-matmul": matmul, "torch-ddp": ddp, "torch-sharding": sharding}
