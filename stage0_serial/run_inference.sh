#!/bin/sh
# Continue a text: ./run_inference.sh --prompt "In the spring of". The flag --help lists all flags.
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../.venv/bin/python  # make train creates it
exec "${PYTHON:-$([ -x "$venv" ] && echo "$venv" || echo python3)}" "$here/inference.py" "$@"
