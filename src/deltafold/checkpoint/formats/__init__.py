"""config.json of one architecture each -> ModelConfig; `checkpoint/config.py` chooses."""
