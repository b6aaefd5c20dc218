"""Memory that outlives a step: its plan, and the integer pools that say who owns which part."""
