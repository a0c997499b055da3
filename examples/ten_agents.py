"""Ten agents on one model: one long system prompt, computed once, and a conversation for each."""

from __future__ import annotations

import asyncio

import lmstate

RULES = "You are one of ten researchers. Answer in one short sentence. " * 40
TOPICS = ["tides", "bees", "glass", "maps", "salt", "wind", "clocks", "bridges", "ink", "moss"]


async def research(engine: lmstate.Engine, topic: str) -> str:
    agent = engine.session(topic)
    system = {"role": "system", "content": RULES}
    await agent.send([system, {"role": "user", "content": f"Name a fact on {topic}."}], max_new_tokens=40)
    answer = await agent.send("Why does it matter?", max_new_tokens=40, temperature=0.7, seed=1)
    usage = answer.usage
    return f"{topic}: {answer.texts[0].strip()}\n   ({usage.reused} of {usage.prompt} tokens of the prompt reused)"


async def main() -> None:
    async with lmstate.Engine(lmstate.load("smollm2"), rows=10) as engine:
        for line in await asyncio.gather(*(research(engine, topic) for topic in TOPICS)):
            print(line)
        stats = engine.stats()
        print(f"{stats['prompt_tokens']:.0f} tokens of prompts, {stats['computed_tokens']:.0f} computed")


if __name__ == "__main__":
    asyncio.run(main())
