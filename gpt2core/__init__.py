"""The shared tensor and autograd core of a GPT-2 with four runtimes; it imports no stage."""

__version__ = "0.1.0"
