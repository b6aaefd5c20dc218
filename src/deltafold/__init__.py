"""deltafold: an inference engine for hybrid linear-attention language models. The names below are its surface."""
