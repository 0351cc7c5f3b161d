"""Which prefix lies where: decisions only, no tensors."""
