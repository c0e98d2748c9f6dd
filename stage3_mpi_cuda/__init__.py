"""Stage 3: GPT-2 on many GPUs, one per rank. MPI starts the ranks and sends host data; NCCL sends GPU data."""
