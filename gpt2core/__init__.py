"""The code that the four stages of this GPT-2 share: tensors, autograd, model, training. It imports no stage."""

__version__ = "0.1.0"
