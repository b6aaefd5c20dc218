"""How the model that ships inside deltafold was made: text, tokenizer, training, scores. See docs/builtin-model.md."""
