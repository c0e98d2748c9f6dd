#!/usr/bin/env bash
# Stage 3 as a Slurm job: sbatch slurm.sh --preset gpt2 --precision bf16 --steps 1000, from this directory.
# Written after Slurm's and NCCL's documentation and checked with `bash -n`; it was not run on a Slurm cluster.

#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4        # ranks a node, and
#SBATCH --gpus-per-node=4          # GPUs a node: one for each rank, whose number on its node picks it
#SBATCH --cpus-per-task=8          # a rank launches kernels from one core; reading and tokenizing take a few more
#SBATCH --time=01:00:00
#SBATCH --output=slurm-%j.out
# A minute before the limit every rank gets a SIGTERM: the step in hand is finished and saved, and all exit with 143.
# Submitting the job again then goes on from there. The minute must be longer than a step and a checkpoint.
#SBATCH --signal=TERM@60

set -euo pipefail

# An environment that all nodes see under the same path, with an mpi4py that loads the MPI for which srun is told to
# speak; ../stage1_mpi/slurm.sh has more on that. MPI carries little here, so that of the mpich wheel will do.
source "${VENV:-../.venv}/bin/activate"

# What NCCL may have to be told, where it does not find out by itself. NCCL_DEBUG=INFO says what it has found.
#export NCCL_SOCKET_IFNAME=eth0    # the network over which ranks of different nodes find each other
#export NCCL_IB_HCA=mlx5           # the InfiniBand adapters that carry the data; NCCL_IB_DISABLE=1 does without
#export NCCL_DEBUG=WARN

out=../out/stage3-slurm
resume=(--overwrite)  # without a checkpoint; a log that a job before it began is renamed
if compgen -G "$out/step-*" > /dev/null; then
  resume=(--resume "$out")
fi

# --gpu-bind=none: a rank must see its neighbours' GPUs, or NCCL reaches them through the host. Then the rank's number
# on its node picks its own; where Slurm shows each rank a single GPU all the same, that one is number 0, and right too.
exec srun --mpi="${MPI:-pmi2}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --gpu-bind=none \
  python train_gpt2.py --out "$out" --checkpoint-every 100 "${resume[@]}" "$@"
