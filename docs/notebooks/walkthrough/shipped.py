"""Results that were measured on other machines and are shipped in results/, for figures without that hardware."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[3] / "results"


def shipped(name):
    """The results of results/<name>.json, or None without this file; prints hardware, date, commit and file.

    It does not print the command of the file: its module may have another name now (see results/README.md).
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        print(f"results/{name}.json is missing: a benchmark on a machine with a GPU writes it (benchmarks/README.md)")
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    print(f"measured on {source(record)}, commit {record['commit']}: results/{name}.json")
    return record["results"]


def source(record):
    """The hardware and the date of a results file."""
    machine = record["hardware"]
    if machine.get("gpu"):
        return f"{machine['gpus']} x {machine['gpu']}, {record['date'][:10]}"
    return f"{machine['cpu']}, {machine['cores']} cores, {record['date'][:10]}"
