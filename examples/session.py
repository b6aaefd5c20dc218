"""A conversation that goes on where it was saved, without computing its past again."""

import tempfile
from pathlib import Path

from deltafold import Engine, SamplingParams

params = SamplingParams(max_tokens=24, temperature=0)
with tempfile.TemporaryDirectory() as folder, Engine.load(device="cpu") as engine:
    path = Path(folder) / "talk.safetensors"
    session = engine.session()
    print(session.chat("What is a kluge?", params).text)
    session.save(path)

    later = engine.restore(path)
    branch = engine.fork(later)
    for talk, question in ((later, "What does charity mean?"), (branch, "Who are you?")):
        completion = talk.chat(question, params)
        print(completion.text, completion.usage.num_cached_tokens)
