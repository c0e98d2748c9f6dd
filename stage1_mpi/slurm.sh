#!/usr/bin/env bash
# Stage 1 as a Slurm job: sbatch slurm.sh --preset paper --steps 1000, from this directory.
# Written from the documentation of Slurm.
# It was run with programs in place of Slurm's, not on a Slurm cluster.

#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4        # ranks per node; the number of all ranks: a power of two, or add --no-deterministic
#SBATCH --cpus-per-task=4          # cores of a rank, and threads of its training
#SBATCH --time=01:00:00
#SBATCH --output=slurm-%j.out
# Slurm starts the job again after the failure of a node (--requeue). 120 seconds before the time limit it sends SIGUSR1
# to this script (B: not to the ranks), which sends SIGTERM to the ranks. They finish the current step, save a
# checkpoint and exit with code 143; then the script asks Slurm to start the job again. The 120 seconds must be enough
# for one step and one checkpoint. A job that is started again continues from its newest checkpoint.
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append         # of the output, which has the lines of all starts

set -euo pipefail

# The Python environment must have the same path on all nodes (a shared file system). Its mpi4py must load an MPI
# library that fits srun's --mpi option below; this prints the library:
#   python -c "from mpi4py import MPI; print(MPI.Get_library_version())"
# The mpich wheel uses TCP. To use the cluster's own network: module load openmpi, then
# pip install --no-binary mpi4py mpi4py.
source "${VENV:-../.venv}/bin/activate"

out=${OUT:-../out/stage1-slurm}
resume=(--overwrite)  # used if there is no checkpoint; an existing log of an earlier job is renamed
if compgen -G "$out/step-*" > /dev/null; then
  resume=(--resume "$out")
fi

# srun starts the ranks itself, without mpiexec and without a host file. Its --mpi option selects how the ranks connect:
#   --mpi=pmi2  MPICH, Intel MPI, MVAPICH
#   --mpi=pmix  Open MPI 4 and 5, and an MPICH that was built with PMIx
# `srun --mpi=list` lists the values that this Slurm supports. With a wrong value every rank runs as a job of one rank,
# and every rank prints the first lines of the output. If Slurm supports neither value, replace srun by
# mpiexec -n "$SLURM_NTASKS" python ...; mpiexec gets the nodes from Slurm.
# --cpus-per-task is given to srun again, because srun does not inherit it from sbatch since Slurm 22.05. --threads is
# given because Slurm already limits each rank to its cores.
cores=${SLURM_CPUS_PER_TASK:-1}
srun --mpi="${MPI:-pmi2}" --cpus-per-task="$cores" \
  python train_gpt2.py --threads "$cores" --out "$out" --checkpoint-every 100 --checkpoint-seconds 600 \
  "${resume[@]}" "$@" &
ranks=$!

# srun forwards SIGTERM to all ranks. After SIGTERM to this script, for example before another job takes the nodes,
# Slurm decides whether it starts the job again. A signal ends `wait`, so it is repeated.
signals=0 time_is_up=
trap 'signals=$((signals + 1)) time_is_up=yes; kill -TERM "$ranks" || true' USR1
trap 'signals=$((signals + 1)); kill -TERM "$ranks" || true' TERM
before=-1
while [[ $before != "$signals" ]]; do
  before=$signals code=0
  wait "$ranks" || code=$?
done
if [[ -n $time_is_up && $code != 0 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
