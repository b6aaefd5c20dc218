"""Stream two answers at once; they share the engine's steps."""

import asyncio

from deltafold import Engine, SamplingParams


async def answer(engine: Engine, question: str) -> str:
    prompt = engine.chat_token_ids([{"role": "user", "content": question}])
    parts = []
    async with engine.astream(prompt, SamplingParams(max_tokens=24, temperature=0)) as stream:
        async for output in stream:
            parts.append(output.text)
    return "".join(parts)


async def main() -> None:
    with Engine.load(device="cpu") as engine:
        for text in await asyncio.gather(answer(engine, "Who are you?"), answer(engine, "What is a kluge?")):
            print(text)


asyncio.run(main())
