"""Plans distributed training of a PyTorch model, and runs the plan."""

__version__ = "0.1.0"
