#!/usr/bin/env bash
# Stage 1 as a Slurm job: sbatch slurm.sh --preset paper --steps 1000, from this directory.
# Written after Slurm's documentation and checked with `bash -n`; it was not run on a Slurm cluster.

#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4        # ranks a node; their product is a power of two, or add --no-deterministic
#SBATCH --cpus-per-task=4          # cores, and so threads, of a rank
#SBATCH --time=01:00:00
#SBATCH --output=slurm-%j.out
# A minute before the limit every rank gets a SIGTERM: the step in hand is finished and saved, and all exit with 143.
# Submitting the job again then goes on from there. The minute must be longer than a step and a checkpoint.
#SBATCH --signal=TERM@60

set -euo pipefail

# An environment that all nodes see under the same path (a shared file system). mpi4py must load the MPI for which srun
# is told to speak, below: `python -c "from mpi4py import MPI; print(MPI.Get_library_version())"`. The mpich wheel works
# over TCP; for the cluster's own network: module load openmpi, then pip install --no-binary mpi4py mpi4py.
source "${VENV:-../.venv}/bin/activate"

out=../out/stage1-slurm
resume=(--overwrite)  # without a checkpoint; a log that a job before it began is renamed
if compgen -G "$out/step-*" > /dev/null; then
  resume=(--resume "$out")
fi

# srun starts the ranks itself: no mpiexec, no host file. How they find each other is the one thing to choose:
#   --mpi=pmi2  MPICH, Intel MPI, MVAPICH
#   --mpi=pmix  Open MPI 4 and 5, and an MPICH that was built with PMIx
# `srun --mpi=list` tells what this Slurm can do. With the wrong one every rank is a world of its own: the first lines
# of the output then come once a rank. A cluster with neither: mpiexec -n "$SLURM_NTASKS" python ... knows the nodes.
# exec: the job's exit code is the program's. srun is told --cpus-per-task again, since from 22.05 on it does not
# inherit it; the program is told --threads, because Slurm has given each rank its own cores already.
cores=${SLURM_CPUS_PER_TASK:-1}
exec srun --mpi="${MPI:-pmi2}" --cpus-per-task="$cores" \
  python train_gpt2.py --threads "$cores" --out "$out" --checkpoint-every 100 "${resume[@]}" "$@"
