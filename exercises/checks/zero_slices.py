"""Checks of exercise 1.4: the slices of ZeRO-1, and training with them."""

from exercises.checks.common import BUCKET_MB, CONFIG, expect_same_training, real
from exercises.compare import expect_equal
from gpt2core.architecture import parameter_shapes
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.divided.arena import DividedArena


def parts_of_the_arena():
    shapes = list(parameter_shapes(CONFIG))
    for owners, parts in ((1, 1), (1, 2), (2, 2), (1, 3), (3, 3), (4, 4), (64, 64)):
        arena = DividedArena(shapes, owners)
        segment = arena.size // arena.segments
        edges = [arena.segments * i // parts * segment for i in range(parts + 1)]
        even = [arena.size * i // parts for i in range(parts + 1)]
        for index in range(parts):
            want = slice(edges[index], edges[index + 1])
            wrong = [
                (
                    slice(even[index], even[index + 1]),
                    "The part does not consist of whole segments: round to segments.",
                ),
                (
                    slice(arena.segments * index // parts, arena.segments * (index + 1) // parts),
                    "The slice counts segments: multiply by the elements of a segment.",
                ),
                (slice(edges[index], edges[index + 1] - 1), "`stop` of a slice is the index after the last element."),
                (
                    slice(edges[index], edges[index] + arena.segments // parts * segment),
                    "The parts do not cover the arena: its last segments belong to no owner.",
                ),
            ]
            name = f"with {arena.segments} segments of {segment} elements, share({index}, {parts})"
            expect_equal(name, arena.share(index, parts), want, wrong, "the edges in DividedArena.share")


def owned_pieces():
    from gpt2core.parallel.divided.async_all_gather import owned

    arena = real("gpt2core/parallel/divided/arena.py").DividedArena(parameter_shapes(CONFIG), 4)
    part = arena.size // 4
    pieces = {
        "inside one part": (slice(10, 20), [(slice(10, 20), 0)]),
        "in two parts": (slice(part - 5, part + 7), [(slice(part - 5, part), 0), (slice(part, part + 7), 1)]),
        "from the middle of part 1 to the end": (
            slice(part + 9, arena.size),
            [(slice(part + 9, 2 * part), 1), (slice(2 * part, 3 * part), 2), (slice(3 * part, 4 * part), 3)],
        ),
        "equal to part 2": (slice(2 * part, 3 * part), [(slice(2 * part, 3 * part), 2)]),
    }
    whole = [(slice(i * part, (i + 1) * part), i) for i in range(4)]
    for name, (piece, want) in pieces.items():
        clipped = [(slice(max(a.start, piece.start), min(a.stop, piece.stop)), owner) for a, owner in whole]
        touching = [(a, owner) for a, owner in clipped if a.start <= a.stop]
        wrong = [
            (clipped, "Slices without elements are included: yield a slice only if start < stop."),
            (touching, "An empty slice is included: compare with <, not with <=."),
            (
                [(whole[owner][0], owner) for _, owner in want],
                "The slices are whole parts: intersect them with the piece.",
            ),
            (
                [(slice(a.start - piece.start, a.stop - piece.start), owner) for a, owner in want],
                "The slices count from the piece: they count from the arena.",
            ),
            ([(owner, a) for a, owner in want], "The pair is (slice, owner), in this order."),
        ]
        got = [tuple(pair) for pair in owned(arena, piece, 4)]
        expect_equal(f"owned() of a piece {name}", got, want, wrong, "the intersection of part and piece in owned")


def zero_training():
    look = "DividedArena.share and owned: the parts of all owners together must be the whole arena, without overlap"
    expect_same_training(ParallelConfig(zero=1, zero_gather="forward", bucket_mb=BUCKET_MB), look)
    expect_same_training(ParallelConfig(zero=1), look)
