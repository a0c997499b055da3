"""Best of n with rewinds: an answer sentence by sentence, the likeliest of several, and back from dead ends."""

from __future__ import annotations

import lmstate

WIDTH, DEPTH, FLOOR = 4, 5, -1.5  # ways tried at each step, sentences, least mean log probability of one


def score(logprobs: list[lmstate.engine.TokenLogprob]) -> float:
    return sum(entry.logprob for entry in logprobs) / max(len(logprobs), 1)


def main() -> None:
    model = lmstate.load("smollm2")
    with lmstate.Engine(model) as engine:
        question = [{"role": "user", "content": "Explain why the sky is blue, in five short sentences."}]
        prompt = model.tokenizer.chat(question)
        text, dead, seed = list(prompt), 0, 0
        ends = [len(text)]  # where each sentence that was kept began
        while len(ends) <= DEPTH and dead < 3:
            seed += 1
            got = engine.submit(
                text, n=WIDTH, temperature=0.9, seed=seed, stop=[".", "\n"], max_new_tokens=40, logprobs=0
            ).result()
            assert got.logprobs is not None
            best = max(range(WIDTH), key=lambda index: score(got.logprobs[index]))
            if score(got.logprobs[best]) < FLOOR and len(ends) > 1:
                del text[ends.pop() :]  # the sentence before led nowhere: go back, which computes nothing
                dead += 1
                continue
            text += [*got.tokens[best]]
            ends.append(len(text))
            if got.finished[best] == "eos":
                break
        print(model.tokenizer.decode(text[len(prompt) :]))
        stats = engine.stats()
        print(f"{stats['prompt_tokens']:.0f} tokens of prompts, {stats['computed_tokens']:.0f} computed")


if __name__ == "__main__":
    main()
