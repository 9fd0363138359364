"""Check whether a draft fits a target: first files and configs, then a few prompts.

The checks of a method are in its own file (``MethodSpec.examine`` and ``alternatives``); this module has the common ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, pstdev
from typing import TYPE_CHECKING, Any

import torch

from outrider.bench.contenders import Contender, Contenders
from outrider.bench.measure import Run, generate
from outrider.bench.workloads import builtin, encode
from outrider.engine.finding import candidates, target_files
from outrider.engine.llm import LLM
from outrider.errors import errors_as
from outrider.hub import local_gguf
from outrider.memory import free_memory, size
from outrider.method_text import join_method, split_method
from outrider.proposers.method import Setting
from outrider.registry import PLAIN, PROPOSERS
from outrider.runner.config import RunnerConfig, torch_device
from outrider.runner.footprint import bytes_in_memory
from outrider.runner.loading import load_config, model_class, num_experts, text_config
from outrider.runner.rounding import choose_reader
from outrider.types import Finding, OutriderError, SamplingParams
from outrider.weight_files import weight_bytes

if TYPE_CHECKING:
    from outrider.runner import ModelRunner

WORKLOADS = ("code", "story", "json", "math")  # one prompt each
K = 5  # drafts per round while acceptance is measured, if the method makes as many
# Acceptance of the first draft: below the first limit it does not fit, below the second it is suspicious.
HOPELESS, DOUBTFUL = 0.1, 0.35
EXPENSIVE = 1.8  # time of a pass with K drafts / time of one without, from which it is reported as expensive
CACHED = 256  # context length while passes are timed
# names in configs
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
FALSE_ALARMS = 0.01  # probability that one of the alternatives is reported although all fit as well as the given options

Progress = Callable[[str], Any]


@dataclass(frozen=True)
class DoctorOptions:
    """The target and the options of ``LLM`` to check."""

    target: Any
    method: str
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of LLM: draft, dtype, device, max_len, ...
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=48))


@dataclass(frozen=True)
class Acceptance:
    """Acceptance and speed on a few prompts."""

    by_position: list[float]  # share of the reached drafts that were accepted, at each position that was reached
    mean_acceptance_length: float
    plain_tok_s: float
    tok_s: float
    num_prompts: int
    k: int  # drafts per round that were requested

    @property
    def speedup(self) -> float:
        return self.tok_s / self.plain_tok_s if self.plain_tok_s else 0.0


@dataclass
class Report:
    """All findings of a check, in order."""

    findings: list[Finding] = field(default_factory=list)
    acceptance: Acceptance | None = None

    @property
    def fits(self) -> bool:
        return self.acceptance is not None and not any(finding.level == "wrong" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """Return the verdict in one line."""
        if not self.fits:
            return "does not fit: see the lines marked wrong."
        assert self.acceptance is not None
        doubts = any(finding.level == "suspicious" for finding in self.findings)
        gain = f"{self.acceptance.speedup:.2f} times plain decoding's speed with {self.acceptance.k} drafts per round"
        slower = ", but is slower on this machine" if self.acceptance.speedup < 1 else ""
        return f"fits{', with doubts' if doubts else ''}{slower}: {gain}."


def all_candidates(target: str | None, trusts_code: bool = False) -> list[Finding]:
    """Return a finding for each drafter that method ``auto`` considers, with its size and why it is used or not.

    Empty for the embedded target (None), which comes with its drafts. Downloads none.
    """
    files = target_files(target, trusts_code)
    findings, is_found = [], False
    for each in () if files is None else candidates(files):
        is_used = not (is_found or each.misfit)
        why = "another one is preferred" if is_found and (each.is_absent or not each.misfit) else each.misfit
        result = "used" if is_used else f"not used: {why}"
        findings.append(Finding("ok" if is_used else "note", "drafter", f"{each.line}: {result}"))
        is_found |= is_used
    return findings


def check_draft(checked: DoctorOptions, progress: Progress = lambda _: None) -> Report:
    """Check files, then load, then measure. An error becomes the last finding, not an exception."""
    report = Report()
    try:
        for finding in _stages(checked, report, progress):
            report.findings.append(finding)
            if finding.level == "wrong" and report.acceptance is None:
                break
    except OutriderError as error:
        report.findings.append(Finding("wrong", "loading", str(error)))
    return report


def _stages(checked: DoctorOptions, report: Report, progress: Progress) -> Iterator[Finding]:
    name, options = split_method(checked.method)
    kind, draft, drafts = PROPOSERS.get(name), checked.options.get("draft"), checked.options.get("drafts", {})
    yield from _memory_needed(checked, [*map(local_gguf, kind.drafts_in(options, draft, drafts))])
    progress("loading the target")
    without_draft = {key: value for key, value in checked.options.items() if key != "draft"}
    llm = LLM(checked.target, method=PLAIN, max_batch=1, prefix_cache=False, **without_draft)
    yield _weights_in_memory(llm.runner)
    yield _cache_memory(llm.runner)
    yield _time_of_drafts(llm.runner)
    foreign = checked.options.get("draft_tokenizer")
    setting = Setting(llm.runner, llm.tokenizer, draft, foreign, options=options, drafts=drafts)
    progress(f"checking {name}")
    yield from kind.examine(setting)
    contenders = Contenders(llm, draft)
    contenders.prepare(Contender(checked.method, K))
    yield Finding("ok", "loading", "all files load, and no weight is NaN or infinite")
    if llm.tokenizer is None:
        yield Finding("wrong", "tokenizer", "the target has none, so acceptance cannot be measured")
        return
    prompts = [encode(llm.tokenizer, prompt) for workload in WORKLOADS for prompt in builtin(workload, 1)]
    prompts = [ids[-llm.runner.max_len // 2 :] for ids in prompts]
    drafted = yield from _measured(checked, contenders, prompts, report, progress)
    if drafted.stats.num_drafts:  # even at high acceptance: reading a neighbouring layer lowers it only partly
        yield from _try_alternatives(checked, kind.alternatives(setting), contenders, prompts, drafted, progress)


def _in_turn(checked: DoctorOptions, contenders: Contenders, prompts: list[list[int]], progress: Progress) -> tuple[Run, Run]:
    """Return the runs of plain and speculative decoding. Which of them runs first changes with each prompt."""
    runs: dict[Contender, Run] = {}
    pair = [Contender(PLAIN, 0), Contender(checked.method, K)]
    for contender in pair:  # warm up
        generate(contenders, contender, prompts[:1], SamplingParams(max_tokens=8), batch=1)
    for number, prompt in enumerate(prompts):
        progress(f"prompt {number + 1} of {len(prompts)}, plain and {checked.method}")
        for contender in pair[:: -1 if number % 2 else 1]:
            runs[contender] = generate(contenders, contender, [prompt], checked.params, 1, runs.get(contender))
    return runs[pair[0]], runs[pair[1]]


def _measured(
    checked: DoctorOptions, contenders: Contenders, prompts: list[list[int]], report: Report, progress: Progress
) -> Generator[Finding, None, Run]:
    """Run plain and speculative decoding in turn; report acceptance, speeds and whether outputs are equal.

    Returns the speculative run.
    """
    plain, drafted = _in_turn(checked, contenders, prompts, progress)
    k = contenders.prepare(Contender(checked.method, K)).k  # at most what it drafts
    assert isinstance(k, int)
    by_position = [accepted / reached for accepted, reached in drafted.acceptance_counts()]
    tau = drafted.stats.mean_acceptance_length
    report.acceptance = found = Acceptance(by_position, tau, plain.decode_tok_s, drafted.decode_tok_s, len(prompts), k)
    if drafted.faults:
        yield Finding("wrong", "drafting", f"drafting failed {drafted.faults} time(s), and plain decoding continued")
    first = found.by_position[0] if found.by_position else 0.0
    if not found.by_position:
        yield Finding("note", "acceptance", "nothing was drafted on these prompts, so acceptance is unknown")
    elif first < DOUBTFUL and PROPOSERS.get(split_method(checked.method)[0]).is_model_free:
        yield Finding(
            "note", "acceptance", f"{first:.0%} of first drafts are accepted: these prompts contain little repetition"
        )
    elif first < HOPELESS:
        yield Finding("wrong", "acceptance", f"{first:.0%} of first drafts are accepted: made for another target or"
                      " not trained for this kind of text")  # fmt: skip
    elif first < DOUBTFUL:
        yield Finding("suspicious", "acceptance", f"only {first:.0%} of first drafts are accepted")
    if checked.params.is_greedy:
        same = sum(a == b for a, b in zip(plain.token_ids, drafted.token_ids, strict=True))
        text = f"same text with and without drafts for {same} of {len(prompts)} prompts"
        if same == len(prompts):
            yield Finding("ok", "text", text)
        else:
            yield Finding("note", "text", text + ": rounding decides where two tokens are almost equally likely")
    return drafted


def _try_alternatives(
    checked: DoctorOptions,
    alternatives: list[str],
    contenders: Contenders,
    prompts: list[list[int]],
    drafted: Run,
    progress: Progress,
) -> Iterator[Finding]:
    """Try alternative options of the same method; report the one that fits better."""
    name, given = split_method(checked.method)
    runs: dict[str, Run] = {}
    for alternative in alternatives:
        contender = Contender(join_method(name, given | split_method(f"{name}:{alternative}")[1]), K)
        progress(f"trying {contender.method}")
        runs[contender.method] = generate(contenders, contender, prompts, checked.params, batch=1)
    if not runs:
        return
    best = max(runs, key=lambda method: runs[method].stats.mean_acceptance_length)
    found, tau = runs[best].stats.mean_acceptance_length, drafted.stats.mean_acceptance_length
    if _is_significant(runs[best], drafted, len(runs)):
        yield Finding("suspicious", "options", f"{best} fits better: {found:.2f} tokens per pass instead of {tau:.2f}")
        return
    text = ", ".join(f"{run.stats.mean_acceptance_length:.2f} with {method}" for method, run in runs.items())
    verdict = "no better" if found <= tau else "not significant at this length (raise --max-tokens)"
    yield Finding("ok" if found <= tau else "note", "options", f"{tau:.2f} tokens per pass; {text}: {verdict}")


def _is_significant(better: Run, drafted: Run, num_tried: int) -> bool:
    """Return whether a run, the best of ``num_tried``, accepts significantly more drafts per round (Bonferroni-corrected)."""
    accepted = [[depth for round_ in run.rounds for depth in round_.num_accepted] for run in (better, drafted)]
    if not all(accepted):
        return False
    spread = pstdev([*accepted[0], *accepted[1]]) * sum(1 / len(each) for each in accepted) ** 0.5
    limit = NormalDist().inv_cdf(1 - FALSE_ALARMS / num_tried)
    return fmean(accepted[0]) - fmean(accepted[1]) > limit * spread


def _free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, or of the host for another device. Raises ``OutriderError`` if there is no such GPU."""
    if device.type != "cuda":
        return free_memory()
    with errors_as(f"device {device} is not available", Exception):
        return torch.cuda.mem_get_info(device)[0]


def _memory_needed(checked: DoctorOptions, drafts: list[Any]) -> Iterator[Finding]:
    """Report whether weights in local folders fit into free memory.

    Those of a target to be quantised are not counted: a packed file in the cache may serve, and loading checks it.
    """
    device = torch_device(checked.options.get("device", "auto"))
    needed = sum(weight_bytes(source) for source in drafts if isinstance(source, (str, Path)))
    is_quantised = bool(checked.options.get("weights"))
    whose = "draft's " if is_quantised else ""
    if isinstance(checked.target, (str, Path)) and not is_quantised:
        needed += _bytes_of_target(checked.target, checked.options, device)
    free = _free_memory(device)
    if needed and free is not None:
        text = f"the {whose}weights take {size(needed)}; {size(free)} of memory are free"
        yield Finding("ok" if needed < 0.9 * free else "wrong", "memory", text)


def _bytes_of_target(target: str | Path, options: dict[str, Any], device: torch.device) -> int:
    config = load_config(target, options.get("trust_remote_code", False))
    kind = model_class(config)
    reader = choose_reader(str(target), config, kind, device)
    return bytes_in_memory(target, config, kind, reader, RunnerConfig(dtype=options.get("dtype", "auto")))


def _weights_in_memory(runner: ModelRunner) -> Finding:
    """Report the precision and the memory of the loaded target's weights."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in [*runner.model.parameters(), *runner.model.buffers()]}
    precision = runner.config.weights or "as in the checkpoint"
    return Finding("ok", "weights", f"the target's weights ({precision}) take {size(sum(tensors.values()))} of memory")


def _cache_memory(runner: ModelRunner) -> Finding:
    """Report the cache memory of a request that fills the context window."""
    needed = runner.cache.row_bytes(runner.max_len)
    free = _free_memory(runner.device)
    text = f"a request that fills the context of {runner.max_len} tokens takes {size(needed)} of cache"
    if free is not None and needed > free:
        return Finding("suspicious", "cache", f"{text}; {size(free)} are free: set --max-len")
    return Finding("ok", "cache", text)


def _time_of_drafts(runner: ModelRunner) -> Finding:
    """Report the time of a pass with K drafts relative to one without, and the cause if it is high."""
    k, cached = min(K, runner.max_drafts or K), min(CACHED, runner.max_len // 2)
    one, several = (runner.measure_pass(width, 1, cached) for width in (1, 1 + k))
    ratio = several / one
    text = f"a pass with {k} drafts takes {ratio:.2f} times as long as one without"
    config = text_config(runner.model)
    experts = num_experts(config)
    chosen = next((count for name in EXPERTS_PER_TOKEN if (count := getattr(config, name, None))), None)
    if experts and chosen:
        touched = experts * (1 - (1 - chosen / experts) ** (1 + k))  # by tokens that choose evenly and apart
        text += f": each token reads {chosen} of {experts} experts in a layer, {1 + k} tokens about {touched:.0f} of them"
    if ratio < EXPENSIVE:
        return Finding("ok", "passes", text)
    return Finding("suspicious", "passes", f"{text}; drafts are worthwhile only at high acceptance: leave K at auto")
