#!/usr/bin/env bash
# Stage 3 as a Slurm job: sbatch slurm.sh --preset gpt2 --precision bf16 --steps 1000, from this directory.
# Written from the documentation of Slurm and NCCL.
# It was run with programs in place of Slurm's, not on a Slurm cluster.

#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4        # ranks per node
#SBATCH --gpus-per-node=4          # GPUs per node: one for each rank
#SBATCH --cpus-per-task=8          # cores of a rank: one launches kernels; reading and tokenizing use the others
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

# The Python environment must have the same path on all nodes. Its mpi4py must load an MPI library that fits srun's
# --mpi option; ../stage1_mpi/slurm.sh explains this. MPI transfers little data here, so the mpich wheel is fast enough.
source "${VENV:-../.venv}/bin/activate"

# Set these variables if NCCL selects the wrong network. NCCL_DEBUG=INFO prints what NCCL has selected.
#export NCCL_SOCKET_IFNAME=eth0    # the network over which ranks of different nodes connect
#export NCCL_IB_HCA=mlx5           # the InfiniBand adapters that transfer data; NCCL_IB_DISABLE=1 uses none
#export NCCL_DEBUG=WARN

out=${OUT:-../out/stage3-slurm}
resume=(--overwrite)  # used if there is no checkpoint; an existing log of an earlier job is renamed
if compgen -G "$out/step-*" > /dev/null; then
  resume=(--resume "$out")
fi

# --gpu-bind=none: all GPUs of a node are visible to each of its ranks. Otherwise NCCL transfers between these GPUs
# through the host. A rank uses the GPU whose number is its own number on the node, modulo the number of visible GPUs.
# So it also uses its own GPU if Slurm shows each rank only one GPU.
srun --mpi="${MPI:-pmi2}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --gpu-bind=none \
  python train_gpt2.py --out "$out" --checkpoint-every 100 --checkpoint-seconds 600 "${resume[@]}" "$@" &
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
