"""Generate with a draft model and print its acceptance. Usage: python examples/generate.py [TARGET] [DRAFT]"""

import sys

from outrider import LLM, SamplingParams


def main(target: str | None = None, draft: str | None = None) -> None:
    # Without arguments: the embedded models. Without DRAFT, a drafter for TARGET is searched for on this machine.
    with LLM(target, draft=draft) as llm:
        # Stream one prompt.
        for chunk in llm.stream("def mean(values):", SamplingParams(max_tokens=48)):
            print(chunk.text, end="", flush=True)
        print()

        # Generate several prompts at once, two samples of each, with a seed.
        params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=1, n=2)
        for generation in llm.generate(["The sea was", "import os\n"], params):
            for completion in generation.outputs:
                stats = completion.stats
                print(repr(completion.text))
                print(f"  {stats.mean_acceptance_length:.2f} tokens per target pass, {stats.acceptance_histogram}")


if __name__ == "__main__":
    main(*sys.argv[1:])
