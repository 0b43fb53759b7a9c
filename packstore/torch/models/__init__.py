"""torch.models."""
