"""What models share: the step's batch, projections, latent attention, mixture of experts."""
