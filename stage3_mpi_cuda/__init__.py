"""Stage 3: GPT-2 on many GPUs, one per rank. MPI starts the ranks and transfers host data, NCCL transfers GPU data."""
