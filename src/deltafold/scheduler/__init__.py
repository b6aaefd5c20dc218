"""Which requests compute which tokens in a step: policy over integers, no tensors."""
