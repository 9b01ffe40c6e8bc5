"""GPU memory of PyTorch jobs as flame graphs and metrics."""
