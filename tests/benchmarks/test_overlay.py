"""The overlay of several runs: whose curves it draws under which names, and what it refuses."""

import json

import pytest

from benchmarks import overlay
from gpt2core.app.output.output_files import FIELDS

PNG = b"\x89PNG"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(*argv) -> (exit code, standard output, standard error) of the command in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        with pytest.raises(SystemExit) as ended:
            overlay.main(list(argv))
        return ended.value.code, *capsys.readouterr()

    return run


def write_log(path, losses, validated=()):
    rows = [dict.fromkeys(FIELDS, 1.0) | {"step": step, "loss": loss} for step, loss in enumerate(losses)]
    for step in validated:
        rows[step]["val_loss"] = losses[step] + 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_curves_of_all_logs_are_drawn_with_their_names(run, tmp_path, rng, monkeypatch):
    one, two = rng.uniform(1, 5, 7).tolist(), rng.uniform(1, 5, 4).tolist()
    (tmp_path / "runs").mkdir()
    write_log(tmp_path / "one.jsonl", one, validated=[2, 5])
    write_log(tmp_path / "runs" / "one.jsonl", two)
    code, out, err = run("one.jsonl", "runs/one.jsonl")
    assert code == 0 and err == "" and out.endswith("Written to out/overlay.png.\n") and f"{two[-1]:.4f}" in out
    assert (tmp_path / "out" / "overlay.png").read_bytes().startswith(PNG)
    drawn = []
    monkeypatch.setattr(overlay, "write_plot", lambda curves, title, path: drawn.extend([*curves, title]))
    assert run("one.jsonl", "runs/one.jsonl", "--paper")[0] == 0
    *curves, title = drawn
    assert title == "Loss of 2 runs and of the paper" and len(curves) == 3 + 4
    assert [(each.label, each.steps, each.losses) for each in curves[:3]] == [
        ("one", list(range(7)), one),
        ("one, validation", [2, 5], [one[2] + 1, one[5] + 1]),
        ("runs/one", list(range(4)), two),
    ]
    assert curves[0].style["color"] == curves[1].style["color"] != curves[2].style["color"]


@pytest.mark.parametrize(
    "argv, message",
    [
        ("missing.jsonl", "missing.jsonl: No such file or directory; give logs"),
        ("/dev/zero", "/dev/zero: is a device, not a regular file; give logs"),
        (".", ".: Is a directory; give logs"),
        ("text.jsonl", "text.jsonl: line 1 is not a line of a training log"),
        ("words.jsonl", "words.jsonl: this file is not a log"),
        ("one.jsonl --out one.jsonl", "--out one.jsonl: the picture is a PNG file"),
        ("one.jsonl --out text.png", "--out text.png: the file exists and is not a plot of this program"),
        ("", "FILE.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_changes_no_file(run, tmp_path, argv, message):
    write_log(tmp_path / "one.jsonl", [2.0, 1.0])
    (tmp_path / "text.jsonl").write_text("a text\n")
    write_log(tmp_path / "words.jsonl", ["high"])
    (tmp_path / "text.png").write_text("a text\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, out, err = run(*argv.split())
    assert code == 2 and out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_older_picture_is_replaced(run, tmp_path):
    pictures = []
    for loss in (2.0, 9.0):
        write_log(tmp_path / "one.jsonl", [loss, 1.0])
        assert run("one.jsonl", "--out", "a.png")[0] == 0
        pictures.append((tmp_path / "a.png").read_bytes())
    assert pictures[0] != pictures[1]
