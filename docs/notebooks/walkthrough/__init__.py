"""Code for the notebooks of the stages: installation, figures, and the results of machines with GPUs."""
