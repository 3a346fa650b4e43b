"""From nn.Module to one joint forward+backward graph with symbolic sizes."""
