"""A model folder -> a `ModelConfig` and tensors. Import from the modules; this package re-exports nothing."""
