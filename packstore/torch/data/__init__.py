"""torch.data."""
