"""Use a loaded transformers model, including quantised or sharded ones. Usage: python examples/transformers_model.py FOLDER"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import LLM, SamplingParams


def main(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    # Prompt lookup needs no second model. With one: LLM(model, tokenizer=tokenizer, draft="folder or hub id").
    llm = LLM(model, tokenizer=tokenizer, method="ngram", num_draft_tokens=4)
    prompt = "one two three four\none two three four\none two"
    completion = llm.generate(prompt, SamplingParams(max_tokens=24))[0].outputs[0]
    print(completion.text)
    print(f"{completion.stats.mean_acceptance_length:.2f} tokens per target pass")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
