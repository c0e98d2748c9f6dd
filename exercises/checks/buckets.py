"""Checks of exercise 1.3: the plan of the buckets, and training with it."""

from exercises.checks.common import BUCKET_MB, expect_same_training
from exercises.compare import Mismatch, expect_equal
from gpt2core.parallel.config import ParallelConfig

SIZES = {"a": 4, "b": 3, "c": 5, "d": 1, "e": 6}


def planned(sizes, **limits):
    from gpt2core.parallel.data.strategies import plan_buckets

    got = plan_buckets(dict(sizes), **limits)
    if not isinstance(got, list | tuple):
        raise Mismatch("plan_buckets does not return a list", "Return a list of lists of names.")
    return [list(names) if isinstance(names, list | tuple) else names for names in got]


def lists(*words):
    """lists("ed", "c") is [["e", "d"], ["c"]]."""
    return [list(word) for word in words]


def buckets_order():
    wrong = [
        (lists("a", "b", "c", "d", "e"), "The names are in the order of the model: begin with the last name."),
        ([*lists("e", "d", "c", "b", "a"), []], "The last list is empty: return only lists with names."),
        ([[], *lists("e", "d", "c", "b", "a")], "The first list is empty: return only lists with names."),
        (lists("edcba"), "There is one bucket: with least=0 every bucket is closed after its first name."),
    ]
    want = lists("e", "d", "c", "b", "a")
    expect_equal("plan_buckets(sizes)", planned(SIZES), want, wrong, "the order of the names in plan_buckets")
    expect_equal("plan_buckets({})", planned({}), [], [([[]], "Return only lists with names.")], "plan_buckets({})")


def buckets_least():
    wrong = [
        (lists("ed", "cb", "a"), "A bucket with exactly `least` bytes must be closed: compare with >=, not with >."),
        (lists("e", "d", "c", "b", "a"), "The number of bytes is not set back to 0 when a bucket is closed."),
        (lists("e", "dc"), "The last bucket is lost: it is returned even if it has fewer than `least` bytes."),
        (lists("ab", "cd", "e"), "The names are in the order of the model: begin with the last name."),
        (
            lists("e", "cd", "ab"),
            "The names of a bucket are in the wrong order: the last name of the model comes first.",
        ),
    ]
    look = "the line of plan_buckets that closes a bucket"
    expect_equal("plan_buckets(sizes, least=6)", planned(SIZES, least=6), lists("e", "dc", "ba"), wrong, look)
    wrong = [([], "The last bucket is lost: it is returned even if it has fewer than `least` bytes.")]
    expect_equal("plan_buckets(sizes, least=100)", planned(SIZES, least=100), lists("edcba"), wrong, look)


def buckets_most():
    least = float("inf")
    wrong = [
        (lists("edcba"), "`most` is ignored: close the bucket before a name that would bring it above `most` bytes."),
        (lists("edc", "ba"), "The bucket is closed after the name that brings it above `most`: close it before."),
        (lists("e", "d", "c", "b", "a"), "A bucket may have exactly `most` bytes, and its bytes start again at 0."),
        (lists("e", "dc", "b", "a"), "A bucket may have exactly `most` bytes: compare with >, not with >=."),
        (lists("ed", "c", "b", "a"), "The number of bytes is not set back when `most` closes a bucket."),
    ]
    look = "the line of plan_buckets that compares with `most`"
    got = planned(SIZES, least=least, most=7)
    expect_equal("plan_buckets(sizes, least=inf, most=7)", got, lists("ed", "c", "ba"), wrong, look)
    got = planned(SIZES, least=least, most=2)
    wrong = [([[], *lists("e", "d", "c", "b", "a")], "The first list is empty: return only lists with names.")]
    expect_equal("plan_buckets(sizes, least=inf, most=2)", got, lists("e", "d", "c", "b", "a"), wrong, look)


def buckets_training():
    look = "plan_buckets: every parameter must be in exactly one bucket, from the last one to the first"
    expect_same_training(ParallelConfig(dp="bucket", bucket_mb=BUCKET_MB), look)
