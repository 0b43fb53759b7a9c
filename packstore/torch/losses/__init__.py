"""torch.losses."""
