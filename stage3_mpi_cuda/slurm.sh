#!/usr/bin/env bash
# Stage 3 as a Slurm job: sbatch slurm.sh --preset gpt2 --precision bf16 --steps 1000, from this directory.
# Written from the documentation of Slurm and NCCL and checked with `bash -n`; it was not run on a Slurm cluster.

#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4        # ranks per node
#SBATCH --gpus-per-node=4          # GPUs per node: one for each rank
#SBATCH --cpus-per-task=8          # cores of a rank: one launches kernels; reading and tokenizing use the others
#SBATCH --time=01:00:00
#SBATCH --output=slurm-%j.out
# Slurm sends SIGTERM to every rank 60 seconds before the time limit. The ranks then finish the current step, save a
# checkpoint and exit with code 143. If you submit the job again, it continues from this checkpoint. The 60 seconds must
# be enough for one step and one checkpoint.
#SBATCH --signal=TERM@60

set -euo pipefail

# The Python environment must have the same path on all nodes. Its mpi4py must load an MPI library that fits srun's
# --mpi option; ../stage1_mpi/slurm.sh explains this. MPI transfers little data here, so the mpich wheel is fast enough.
source "${VENV:-../.venv}/bin/activate"

# Set these variables if NCCL selects the wrong network. NCCL_DEBUG=INFO prints what NCCL has selected.
#export NCCL_SOCKET_IFNAME=eth0    # the network over which ranks of different nodes connect
#export NCCL_IB_HCA=mlx5           # the InfiniBand adapters that transfer data; NCCL_IB_DISABLE=1 uses none
#export NCCL_DEBUG=WARN

out=../out/stage3-slurm
resume=(--overwrite)  # used if there is no checkpoint; an existing log of an earlier job is renamed
if compgen -G "$out/step-*" > /dev/null; then
  resume=(--resume "$out")
fi

# --gpu-bind=none: all GPUs of a node are visible to each of its ranks. Otherwise NCCL transfers between these GPUs through the host. A
# rank uses the GPU whose number is its own number on the node, modulo the number of visible GPUs. So it also uses its
# own GPU if Slurm shows each rank only one GPU.
exec srun --mpi="${MPI:-pmi2}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --gpu-bind=none \
  python train_gpt2.py --out "$out" --checkpoint-every 100 "${resume[@]}" "$@"
