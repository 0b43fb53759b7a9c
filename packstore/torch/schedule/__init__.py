"""torch.schedule."""
