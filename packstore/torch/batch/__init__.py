"""torch.batch."""
