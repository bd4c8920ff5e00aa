"""Data-parallel training over torch.distributed: the gradient reducer (reducer/) and ZeRO (zero/)."""
