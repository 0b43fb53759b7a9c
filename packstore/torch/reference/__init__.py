"""torch.reference."""
