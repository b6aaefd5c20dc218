"""Text to token ids and back: vocabularies, chat templates, incremental detokenization. Imports no torch.

`tokenizer.py` is the door; `vocabulary.py` reads the files it stands on, `tiktoken.py` the tiktoken kind.
"""

from deltafold.tokenizer.tiktoken import ConversionReport
from deltafold.tokenizer.tiktoken import convert as convert_tokenizer

__all__ = ["ConversionReport", "convert_tokenizer"]
