"""Stage 3: many GPUs, one for each rank. MPI starts the ranks and carries what is on the host, NCCL what is on GPUs."""
