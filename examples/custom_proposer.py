"""Write a custom proposer that drafts from a few known sentences. Usage: custom_proposer.py [TARGET]"""

import sys

from outrider import LLM, Context, Proposal, Proposer, SamplingParams, chain_proposal

KNOWN = ["The capital of France is Paris.", "The capital of Italy is Rome.", "I do not know."]


class KnownAnswers(Proposer):
    """Complete a known sentence that the last tokens begin."""

    name = "known"

    def __init__(self) -> None:
        self.sentences: list[list[int]] = []  # token ids

    def propose(self, context: Context, k: int) -> Proposal:
        return chain_proposal(
            [self._rest(request.token_ids)[: min(k, n)] for request, n in zip(context.requests, context.limits, strict=True)]
        )

    def _rest(self, token_ids: list[int]) -> list[int]:
        for sentence in self.sentences:
            for begun in range(len(sentence) - 1, 0, -1):
                if token_ids[-begun:] == sentence[:begun]:
                    return sentence[begun:]
        return []


def main(target: str | None = None) -> None:
    proposer = KnownAnswers()
    llm = LLM(target, proposer=proposer, num_draft_tokens=6)
    proposer.sentences = [llm.encode(" " + sentence, add_special_tokens=False) for sentence in KNOWN]
    question = "Question: What is the capital of Italy?\nAnswer: The capital"
    completion = llm.generate(question, SamplingParams(max_tokens=16))[0].outputs[0]
    print(completion.text)
    print("accepted drafts per round:", completion.stats.acceptance_histogram, "faults:", completion.stats.faults)


if __name__ == "__main__":
    main(*sys.argv[1:])
