"""The ladder in exercises/README.md is that of the catalog: level and time of each exercise and each detective."""

from exercises.cases import CASES
from exercises.catalog import EXERCISES, ROOT

HEADER = "| level | minutes | exercise | functions |", "|---:|---:|---|---|"


def ladder():
    """The lines of the table, by level and minutes."""
    rows = []
    for each in EXERCISES:
        names = ", ".join(f"`{name.rpartition('.')[2]}`" for _, name in each.functions)
        rows.append((*each.effort, f"[{each.number} {each.title}](pages/{each.page})", names))
    for number, case in CASES.items():
        rows.append(
            (*case.effort, f"[detective {number}: {case.title}](pages/{case.page})", f"`make detective CASE={number}`")
        )
    return [*HEADER, *(f"| {' | '.join(map(str, row))} |" for row in sorted(rows, key=lambda row: row[:2]))]


def test_the_ladder_of_the_readme_is_that_of_the_catalog():
    lines = (ROOT / "exercises" / "README.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(HEADER[0])
    want = ladder()
    assert lines[start : start + len(want) + 1] == [*want, ""]


def test_each_level_has_exercises_and_each_time_is_plausible():
    efforts = [each.effort for each in (*EXERCISES, *CASES.values())]
    assert {level for level, _ in efforts} == {1, 2, 3}
    assert all(10 <= minutes <= 90 for _, minutes in efforts)
