"""Compare a student's result with the expected one; name the first wrong element, and recognise typical mistakes."""

import numpy as np

RECOGNISED = 10  # a result is recognised as a typical mistake if it is this many tolerances away from it, or nearer


class Mismatch(Exception):
    """A wrong result. The message is one line for the student; `hint` says where to look."""

    def __init__(self, text, hint=""):
        super().__init__(text)
        self.hint = hint


def expect(name, got, want, tolerance, wrong=(), look="", scales=()):
    """Raise Mismatch unless norm(got - want) <= tolerance * norm(want), or equality bit for bit if tolerance is 0.

    got: the student's array. wrong: pairs (array that a typical mistake gives, hint). scales: pairs (factor, hint) for
    results that are `factor` times the expected one. look: where to look if no typical mistake is recognised; it
    follows "Look at".
    """
    if got is None:
        raise Mismatch(f"{name} is None", f"Is a `return` missing? Look at {look}.")
    try:
        got, want = np.asarray(got), np.asarray(want)
        is_number = got.dtype.kind in "fiub"  # floats, integers and booleans
    except (ValueError, TypeError):
        is_number = False
    if not is_number:
        raise Mismatch(f"{name} is not an array of numbers", f"Look at {look}.")
    if got.shape != want.shape:
        transposed = got.shape == want.shape[::-1] and got.ndim > 1
        hint = "The result has the axes of the transpose: a transpose is missing or superfluous. " if transposed else ""
        raise Mismatch(f"{name} has the shape {got.shape}, but {want.shape} is expected", f"{hint}Look at {look}.")
    if is_near(got, want, tolerance):
        return
    raise Mismatch(
        first_difference(name, got, want, tolerance), hint_for(name, got, want, tolerance, wrong, look, scales)
    )


def expect_equal(name, got, want, wrong=(), look=""):
    """Raise Mismatch unless got == want. wrong: pairs (value that a typical mistake gives, hint)."""
    if equal(got, want):
        return
    hint = next((hint for value, hint in wrong if equal(got, value)), f"Look at {look}.")
    raise Mismatch(f"{name}: {short(got)}, but {short(want)} is expected", hint)


def equal(a, b):
    try:
        return bool(a == b)
    except Exception:  # a student's object may raise anything
        return False


def short(value):
    """repr(value), at most 200 characters."""
    try:
        text = repr(value)
    except Exception:
        text = f"an object of {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_near(got, want, tolerance):
    """Whether the two arrays are equal to the given relative norm; NaN is near nothing."""
    if tolerance == 0:
        return bool(np.array_equal(got, want))
    with np.errstate(all="ignore"):
        difference = np.linalg.norm(np.subtract(got, want, dtype=np.float64).ravel())
        return bool(difference <= tolerance * max(np.linalg.norm(want.astype(np.float64).ravel()), 1e-30))


def first_difference(name, got, want, tolerance):
    """A sentence with the first wrong element, both its values, and the number of wrong elements."""
    wrong = elements_that_differ(got, want, tolerance)
    count, where = int(wrong.sum()), np.argwhere(wrong)[0] if wrong.any() else np.zeros(got.ndim, int)
    index = f"[{', '.join(map(str, where))}]" if got.ndim else ""
    element = f"{name}{index}" if name.isidentifier() or not index else f"{name}: element {index}"
    mine, expected = got[tuple(where)], want[tuple(where)]
    digits = "{:.9g}" if f"{mine:.5g}" == f"{expected:.5g}" else "{:.5g}"
    number = f" ({count} of {got.size} elements differ)" if got.size > 1 else ""
    return f"{element} is {digits.format(mine)}, but {digits.format(expected)} is expected{number}"


def elements_that_differ(got, want, tolerance):
    """A boolean array: the elements whose difference is not a rounding error."""
    if tolerance == 0:
        return got != want
    with np.errstate(all="ignore"):
        size = np.sqrt(np.mean(np.square(want.astype(np.float64)))) if want.size else 0.0
        bound = tolerance * np.maximum(np.abs(want), size)
        found = ~(np.abs(np.subtract(got, want, dtype=np.float64)) <= bound)
        return found if found.any() else np.abs(got - want) == np.max(np.abs(got - want))


def hint_for(name, got, want, tolerance, wrong, look, scales):
    """The hint of the first typical mistake that gives `got`; otherwise what can be said of the difference."""
    near = RECOGNISED * (tolerance or 1e-6)
    for array, hint in wrong:
        array = np.asarray(array)
        if array.shape == got.shape and (is_near(got, array, near) or same_nan(got, array, near)):
            return hint
    for factor, hint in scales:
        if is_near(got, factor * want, near):
            return hint
    return f"{general_hint(name, got, want, near)}Look at {look}."


def same_nan(got, array, near):
    """Whether the typical mistake gives NaN or infinity in the same elements, and equal numbers elsewhere."""
    finite = np.isfinite(array)
    return not finite.all() and np.array_equal(np.isfinite(got), finite) and is_near(got[finite], array[finite], near)


def general_hint(name, got, want, near):
    """A sentence about a difference that can be recognised in any array, with a space after it; "" if there is none."""
    name = "the result" if name.startswith(("with ", "on ")) else name
    finite = np.isfinite(got.astype(np.float64))
    if not finite.all() and np.isfinite(want.astype(np.float64)).all():
        count = int((~finite).sum())
        part = "Every element" if not finite.any() else f"{count} of {got.size} elements"
        verb = "is" if count in (1, got.size) else "are"
        return f"{part} of {name} {verb} NaN or infinite: a number was never written, overflows or is divided by zero. "
    if not got.any() and want.any():
        return f"Every element of {name} is 0: it is never written, or multiplied by 0. "
    if is_near(got, -want, near):
        return f"The sign is wrong: every element of {name} is minus the expected one. "
    if got.ndim > 1 and got.shape[-1] == got.shape[-2] and is_near(got, want.swapaxes(-1, -2), near):
        return f"{name} is the transpose of the expected result: a transpose is missing or superfluous. "
    if (sentence := shifted(name, got, want, near)) or (sentence := multiple(name, got, want, near)):
        return sentence
    return confined(name, elements_that_differ(got, want, near))


def shifted(name, got, want, near):
    """A sentence if `got` is `want`, moved by one position along an axis."""
    for axis in range(got.ndim):
        n = got.shape[axis]
        for step, direction in ((1, "later"), (-1, "earlier")):
            if n > 2 and is_near(got, np.roll(want, step, axis), near):
                return f"{name} is one position {direction} than expected along axis {axis}: an index is off by one. "
            moved, kept = slice(max(step, 0), n + min(step, 0)), slice(max(-step, 0), n + min(-step, 0))
            a, b = np.moveaxis(got, axis, 0)[moved], np.moveaxis(want, axis, 0)[kept]
            if n > 3 and b.any() and is_near(a, b, near):
                return f"{name} is one position {direction} than expected along axis {axis}: an index is off by one. "
    return ""


def multiple(name, got, want, near):
    """A sentence if `got` is a constant times `want`."""
    square = float(np.vdot(want.astype(np.float64), want.astype(np.float64)))
    factor = float(np.vdot(want.astype(np.float64), got.astype(np.float64))) / square if square else 0.0
    if factor and is_near(got, factor * want, near):
        return f"Every element of {name} is {factor:.6g} times the expected one: a factor is missing or superfluous. "
    return ""


def confined(name, wrong):
    """A sentence if all wrong elements have the same index along one axis."""
    for axis in range(wrong.ndim):
        indices = np.flatnonzero(wrong.any(axis=tuple(i for i in range(wrong.ndim) if i != axis)))
        n = wrong.shape[axis]
        if n > 2 and len(indices) == 1:
            last = {0: " (the first one)", n - 1: " (the last one)"}.get(int(indices[0]), "")
            return f"Only the elements of {name} with index {indices[0]}{last} of axis {axis} are wrong. "
        if (
            n > 2
            and len(indices) <= n // 2
            and np.array_equal(indices, np.arange(indices[0], indices[0] + len(indices)))
        ):
            place = f"{indices[0]} to {indices[-1]}"
            return f"Only the elements of {name} with the indices {place} of axis {axis} are wrong. "
    return ""
