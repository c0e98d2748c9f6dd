"""How much time does bucketed data parallelism add to a step, and which bucket size adds the least?

    s bytes of gradients, w bytes per second of an all-reduce, o seconds per call, n buckets of b = s / n bytes

If the backward of a bucket takes as long as its all-reduce, the all-reduce of each bucket runs during the backward of
the next one; only that of the last bucket is exposed, and every call adds its overhead:

    overhead(n) = s / (n w) + n o          smallest at  n = sqrt(s / (w o)),  b = s / n = sqrt(s w o)

`pipelined` computes the other cases from the time of backward: with a fast network only the last bucket is exposed, so
small buckets are the best; with a slow network most of s / w is exposed, whatever n is. w and o are fitted to the rows
of `all_reduce` only; the rows of `ddp` are compared with the result.

    python -m benchmarks.torch.ddp_model            # after all_reduce and ddp
    python -m benchmarks.torch.ddp_model --ranks 4  # for four ranks
"""

import argparse
from math import sqrt

import numpy as np

from benchmarks.harness.drawing import panels
from benchmarks.harness.report import print_table, save
from benchmarks.harness.rows import saved_rows
from benchmarks.harness.script import benchmark
from benchmarks.ranks.collectives import fit_line
from gpt2core.errors import ConfigError
from gpt2core.parallel.data.bucket_size import best_bucket

MIB = 2**20


def overhead(s, w, o, n):
    """Seconds that n buckets of s / n bytes add, if backward takes as long as the communication."""
    return s / (n * w) + n * o


def best_size(s, w, o):
    """The bucket size in bytes with the smallest overhead: sqrt(s w o)."""
    return best_bucket(o, 1 / w, s)


def pipelined(s, w, o, n, backward):
    """Seconds between the end of backward and the end of the last of n equal buckets, one all-reduce after another.

    backward: its seconds; every n-th part of them completes a bucket.
    """
    message, end = o + s / (n * w), 0.0
    for bucket in range(1, int(n) + 1):
        end = max(end, backward * bucket / n) + message
    return end - backward


def fit(rows, backend, ranks):
    """(w bytes per second, o seconds) of the all-reduces of a backend, by least squares of the relative error.

    Raises ConfigError if there are fewer than two sizes.
    """
    found = [row for row in rows if row["name"].startswith(f"{backend}, {ranks} ranks,") and "time" in row]
    if len({row["bytes"] for row in found}) < 2:
        raise ConfigError(
            f"all_reduce has {len(found)} rows of {backend} on {ranks} ranks, and a fit needs two sizes: run python -m "
            f"benchmarks.torch.all_reduce --libraries {backend} --ranks {ranks}"
        )
    o, per_byte = fit_line([row["bytes"] for row in found], [row["time"]["mean"] / 1e3 for row in found])
    if per_byte <= 0:
        raise ConfigError(f"the times of {backend} on {ranks} ranks do not grow with the size: measure larger sizes")
    return 1 / per_byte, max(o, 1e-9)


def read(args, name):
    """The rows of another command, from results/ if it has them, else from out/results/."""
    for saved in (True, False):
        if rows := saved_rows(argparse.Namespace(benchmark=args.benchmark, save=saved, save_as=name)):
            return rows
    raise ConfigError(f"there is no {name}.json in results/torch or out/results/torch: run its command first")


def compare(rows, settings, w, o):
    """([a row of the table for each bucket size], the row of ddp without synchronisation, s) of one setting.

    Raises ConfigError if ddp has no row without synchronisation.
    """
    of_setting = {row["way"]: row for row in rows if row["name"].startswith(f"{settings}, ") and "step" in row}
    base = of_setting.get("none")
    if base is None:
        raise ConfigError(f"ddp has no row {settings}, none: run python -m benchmarks.torch.ddp with these settings")
    found = []
    for way, row in of_setting.items():
        if way.startswith("bucketed"):
            s, n = row["MB"] * 1e6, row["buckets"]
            measured, model = row["step"]["mean"] - base["step"]["mean"], 1e3 * overhead(s, w, o, n)
            chained = 1e3 * pipelined(s, w, o, n, base["backward"]["mean"] / 1e3)
            found.append({
                "bucket MB": float(way.split()[1]), "buckets": n, "measured ms": measured, "closed form ms": model,
                "pipelined ms": chained, "closed form / measured": model / measured if measured > 0 else float("nan"),
                "pipelined / measured": chained / measured if measured > 0 else float("nan"),
            })  # fmt: skip
    return sorted(found, key=lambda each: each["bucket MB"]), base, s


def draw(found, s, w, o, backward, title, path):
    """Draw the measured overhead over the two curves. A point is at the mean size of its buckets, s / n."""
    with panels(path, figsize=(8, 5)) as (figure, [[panel]]):
        sizes = np.geomspace(s / 3000, s, 100)
        closed = 1e3 * np.array([overhead(s, w, o, s / b) for b in sizes])
        panel.loglog(sizes / MIB, closed, label="closed form")
        panel.fill_between(
            sizes / MIB, closed / 1.2, closed / 0.8, alpha=0.2, label="closed form / measured: 0.8 to 1.2"
        )
        chained = [1e3 * pipelined(s, w, o, max(1, round(s / b)), backward) for b in sizes]
        panel.loglog(sizes / MIB, chained, "--", label="pipelined, with the measured backward")
        for number, each in enumerate(found):
            mean = s / each["buckets"] / MIB
            panel.loglog(mean, each["measured ms"], "ko", label="" if number else "measured")
            place = {
                "xytext": (0, -14 if number % 2 else 8),
                "textcoords": "offset points",
                "ha": "center",
                "fontsize": 8,
            }
            panel.annotate(f"{each['bucket MB']:g} MiB", (mean, each["measured ms"]), **place)
        panel.axvline(best_size(s, w, o) / MIB, color="grey", linewidth=0.8, label="best size of the closed form")
        panel.set(xlabel="mean size of a bucket, MiB (at a point: the largest size)", ylabel="added ms of a step")
        panel.set_title(title)
        panel.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)


@benchmark(
    size=dict(default="xl", help="model of the rows of ddp (default xl)"),
    backend=dict(default="nccl", help="backend of both files' rows (default nccl)"),
    ranks=dict(type=int, default=2, help="ranks of both files' rows (default 2)"),
    batch=dict(type=int, default=4, help="sequences of a rank in the rows of ddp (default 4)"),
    context=dict(type=int, default=128, help="tokens of a sequence in the rows of ddp (default 128)"),
    all_reduce=dict(default="all_reduce", help="name of the file to fit (default all_reduce)"),
    ddp=dict(default="ddp", help="name of the file to compare with (default ddp)"),
)
def main(args):
    w, o = fit(read(args, args.all_reduce), args.backend, args.ranks)
    settings = f"{args.size}, {args.backend}, {args.ranks} ranks, batch {args.batch}, context {args.context}"
    found, base, s = compare(read(args, args.ddp), settings, w, o)
    print_table([{key: f"{value:.4g}" for key, value in each.items()} for each in found])
    best, measured = best_size(s, w, o), min(found, key=lambda each: each["measured ms"])["bucket MB"]
    print(
        f"\n{settings}: w {1e-9 * w:.3g} GB/s and o {1e6 * o:.3g} us from all_reduce; s {1e-6 * s:.4g} MB, so "
        f"n = sqrt(s / (w o)) = {sqrt(s / (w * o)):.3g} buckets of {best / MIB:.3g} MB; measured best {measured:g} MB."
        f"\nThe all-reduce of s takes {1e3 * s / w:.4g} ms, backward {base['backward']['mean']:.4g} ms: the closed "
        f"form assumes that they are equal."
    )
    backward = base["backward"]["mean"]
    results = {"settings": settings, "w": w, "o": o, "bytes": s, "best_bucket_bytes": best}
    path = save({**results, "backward_ms": backward, "fastest_bucket_mb": measured, "rows": found}, args)
    draw(found, s, w, o, backward / 1e3, settings, path.with_suffix(".png"))
