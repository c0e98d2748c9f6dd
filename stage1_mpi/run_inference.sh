#!/bin/sh
# Continue a text on N ranks: N=2 ./run_inference.sh --prompt "In the spring of". The flag --help lists all flags.
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../.venv/bin/python  # make train creates it
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-$([ -x "$venv" ] && echo "$venv" || echo python3)}" -m stage1_mpi.launch -n "${N:-1}" -- "$here/inference.py" "$@"
