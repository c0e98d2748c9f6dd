"""The comparison of arrays: it finds any wrong element, recognises typical mistakes, and never fails itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from exercises.compare import Mismatch, expect, expect_equal

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(0)
WANT = RNG.standard_normal((4, 5, 5))
ROWS = RNG.standard_normal((6, 8))


def mismatch(got, want, tolerance=1e-9, **options):
    with pytest.raises(Mismatch) as caught:
        expect("y", got, want, tolerance, look="this line", **options)
    return caught.value


@pytest.mark.parametrize(
    "got, words",
    [
        (-WANT, "sign is wrong: every element of y is minus"),
        (WANT.swapaxes(1, 2), "y is the transpose of the expected result"),
        (3 * WANT, "Every element of y is 3 times the expected one"),
        (0 * WANT, "Every element of y is 0"),
        (np.nan * WANT, "Every element of y is NaN"),
        (np.roll(WANT, 1, 1), "one position later than expected along axis 1"),
        (np.roll(WANT, -1, 2), "one position earlier than expected along axis 2"),
        (np.where(np.arange(5) == 4, 7, WANT), "Only the elements of y with index 4 (the last one) of axis 2"),
        (np.where(np.arange(5) < 2, 7, WANT), "Only the elements of y with the indices 0 to 1 of axis 2"),
        (np.where(np.indices(WANT.shape)[0] == 0, np.inf, WANT), "25 of 100 elements of y are NaN"),
    ],
)
def test_a_general_mistake_is_recognised(got, words):
    error = mismatch(got, WANT)
    assert words in error.hint and error.hint.endswith("Look at this line.")


def test_zeros_beside_one_wrong_element_are_not_called_moved():
    got, want = np.zeros(6), np.zeros(6)
    got[0], want[5] = 3, 5
    assert mismatch(got, want).hint == "Look at this line."
    want[0] = 5
    assert "one position" not in mismatch(got, want).hint


def test_the_hint_is_a_sentence_for_a_long_name():
    with pytest.raises(Mismatch) as caught:
        expect("with 2 ranks, the array of rank 0", np.nan * ROWS, ROWS, 0, look="this line")
    assert caught.value.hint.startswith("Every element of the result is NaN or infinite")


def test_the_first_wrong_element_is_named_with_both_values():
    got = ROWS.copy()
    got[2, 3], got[4, 1] = 7, 8
    assert str(mismatch(got, ROWS)) == f"y[2, 3] is 7, but {ROWS[2, 3]:.5g} is expected (2 of 48 elements differ)"
    assert str(mismatch(np.float64(2), np.float64(1))) == "y is 2, but 1 is expected"
    close = mismatch(np.array([1.0000001]), np.array([1.0]))
    assert str(close) == "y[0] is 1.0000001, but 1 is expected"


def test_a_typical_mistake_of_the_check_comes_first():
    wrong = [(-ROWS, "subtract, do not add")]
    assert mismatch(-ROWS, ROWS, wrong=wrong).hint == "subtract, do not add"
    scales = [(0.5, "divided by 2")]
    assert mismatch(ROWS / 2, ROWS, scales=scales).hint == "divided by 2"
    with_nan = np.where(np.arange(8) == 0, np.nan, ROWS)
    assert mismatch(with_nan, ROWS, wrong=[(with_nan, "the first column")]).hint == "the first column"
    for other in (ROWS[:5], np.zeros(8), np.float64(0)):  # of another shape, also if NumPy could broadcast it
        assert mismatch(0 * ROWS, ROWS, wrong=[(other, "zeros")]).hint.startswith("Every element of y is 0")


def test_a_wrong_type_or_shape_is_named():
    assert "y is None" in str(mismatch(None, ROWS))
    assert "y is not an array of numbers" in str(mismatch("text", ROWS))
    assert "y is not an array of numbers" in str(mismatch([[1], [2, 3]], ROWS))
    assert "y has the shape (8, 6), but (6, 8) is expected" in str(mismatch(ROWS.T, ROWS))
    assert "transpose" in mismatch(ROWS.T, ROWS).hint


def test_a_result_within_the_tolerance_passes():
    expect("y", ROWS * (1 + 1e-12), ROWS, 1e-9)
    expect("y", ROWS, ROWS, 0)
    expect("y", np.zeros((0, 3)), np.zeros((0, 3)), 1e-9)
    assert "1 of 48" in str(mismatch(np.nextafter(ROWS, np.where(np.arange(48).reshape(6, 8) == 9, 9, ROWS)), ROWS, 0))


def test_values_that_are_not_arrays_are_compared_and_shortened():
    expect_equal("x", [1], [1])
    with pytest.raises(Mismatch, match=r"^x: \[0, 0.*\.\.\., but \[1\] is expected$") as caught:
        expect_equal("x", [0] * 999, [1], [([0] * 999, "too many")])
    assert caught.value.hint == "too many"


SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
DTYPES = st.sampled_from([np.float64, np.float32, np.int32, np.bool_, np.complex128, np.float16])


@given(st.data())
def test_any_array_passes_or_gives_one_line(data):
    shape = data.draw(SHAPES)
    got = data.draw(arrays.arrays(data.draw(DTYPES), shape if data.draw(st.booleans()) else data.draw(SHAPES)))
    want = data.draw(arrays.arrays(np.float64, shape, elements=st.floats(-1e6, 1e6)))
    for tolerance in (0, 1e-6):
        try:
            expect("y", got, want, tolerance, [(want + 1, "hint")], "the line", [(2, "twice")])
        except Mismatch as error:
            assert "\n" not in str(error) + error.hint and error.hint
        else:
            assert np.allclose(got, want, rtol=1e-3, atol=1e-3)
