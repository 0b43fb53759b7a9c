"""torch.integrations."""
