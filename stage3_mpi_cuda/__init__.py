"""Stage 3: GPT-2 on many GPUs, one for each rank. MPI starts the ranks and transfers host data, NCCL GPU data."""
