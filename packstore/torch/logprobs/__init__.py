"""torch.logprobs."""
