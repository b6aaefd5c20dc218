"""Complete a few prompts with the model that ships in the package."""

from deltafold import Engine, SamplingParams

with Engine.load(device="cpu") as engine:
    params = SamplingParams(max_tokens=24, temperature=0)
    for completion in engine.complete(["In the beginning", "And it came to pass"], params):
        print(completion.text, completion.finish_reason, completion.usage)
