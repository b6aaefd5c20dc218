"""From a scheduled step to drawn tokens: inputs, forward, sampling."""
