"""Stages of the recipe. Each reads the previous stage's output from the work folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.files import replaced
from outrider.heads.checkpoint import named_errors
from outrider.progress import shown
from outrider.train import distillation, plots
from outrider.train.claims import check_or_record_identity, fingerprint
from outrider.train.continuation import continue_rows
from outrider.train.distillation import DistillationLoss
from outrider.train.draft_model import copy_layers
from outrider.train.options import Distillation
from outrider.train.plan import TrainingPlan
from outrider.train.precision import arithmetic_dtype
from outrider.train.shrink import shrink
from outrider.train.trainer import Trainer

from . import card, corpus, data, evaluate, loops, model, prompts, report, tokenizer
from .config import PRESETS, Growth, Preset
from .evaluate import HeldOut


@dataclass(frozen=True)
class Workshop:
    """One run of the recipe: preset, corpus and work folder."""

    preset_name: str
    corpus: Path
    folder: Path
    compiled: bool = True
    minutes: float | None = None  # overrides the plan's budget
    tokens_in_all: int | None = None  # overrides the plan's tokens; a run that is past the start of the decay ends soon
    start: Path | None = None  # folder of a target, or draft, to go on from; otherwise a new one

    @property
    def preset(self) -> Preset:
        """Return the sizes and plans."""
        return PRESETS[self.preset_name]

    def plan(self, own: TrainingPlan) -> TrainingPlan:
        """Return a preset's plan with this run's budgets."""
        tokens, minutes = self.tokens_in_all or own.max_tokens, self.minutes or own.minutes
        return replace(own, max_tokens=tokens, minutes=minutes)

    @property
    def device(self) -> torch.device:
        """Return the GPU if there is one, else the CPU."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def tokens(self) -> Path:
        """Return the folder of the tokenised text."""
        return self.folder / "tokens"

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the learned tokenizer."""
        return tokenizer.load(self.folder / "tokenizer")

    def held_out(self, long: bool) -> HeldOut:
        """Return held-out rows: a few thousand tokens of each source, or several times as many if ``long``."""
        fitting, weights = min(256, self.preset.max_positions // 2), {s.name: s.in_total for s in corpus.SOURCES}
        return evaluate.held_out(self.tokens, self.tokenizer, weights, fitting, 8_192 if long else 4_096)

    def claim_start(self, stage: str) -> None:
        """Raise ``OutriderError`` if the run of a stage started from another folder."""
        check_or_record_identity(self.folder / stage / "run.json", {"start": None if self.start is None else str(self.start)})


def prepare(shop: Workshop) -> None:
    """Train the tokenizer and tokenise every source, unless this was done already."""
    if (shop.tokens / "tokens.json").exists():
        return
    splits = corpus.load(shop.corpus, shop.preset.source_megabytes)
    for name, split in splits.items():
        print(f"{name}: {len(split.train)} documents, {sum(map(len, split.train)) / 1e6:.2f} M characters, "
              f"held out {len(split.held_out)}", flush=True)  # fmt: skip
    if shop.start is not None:  # its embeddings are those of its own tokens
        learned = tokenizer.load(shop.start)
    else:
        learned = tokenizer.train(tokenizer.balanced_sample(splits, 24_000_000), shop.preset.vocab)
    learned.save_pretrained(shop.folder / "tokenizer")
    counts = data.encode_all(learned, splits, shop.tokens)
    print({name: f"{count / 1e6:.2f} M tokens" for name, count in counts.items()}, flush=True)


def _loss(shop: Workshop, name: str, net: LlamaForCausalLM, plan: TrainingPlan, growth: Growth) -> model.GrowingExitLoss:
    decoder = model.LlamaDecoder(net)
    if shop.compiled:
        model.compile_layers(net)
        decoder.token_loss = torch.compile(decoder.token_loss, dynamic=False)  # type: ignore[method-assign]
    return model.GrowingExitLoss(decoder, shop.preset.layer_skip, arithmetic_dtype(shop.device), plan.seed, growth)


def target_run(shop: Workshop) -> Trainer:
    """Return the target's training run."""
    preset = shop.preset
    plan = shop.plan(preset.target_plan if shop.start is None else preset.further_plan)
    net, growth = model.build(preset.target, preset, plan.seed, shop.device), preset.growth
    if shop.start is not None:
        net.load_state_dict(model.load(shop.start).state_dict())
        growth = replace(growth, grow_at=0.0)
    shop.claim_start("target")

    def measure(final: bool) -> dict[str, Any]:
        found = shop.held_out(final)
        agreement = evaluate.exit_agreement(net, next(iter(found.rows.values()))[:16].to(shop.device))
        return {"bpb": evaluate.bits_per_byte(net, found), "exit_agreement": agreement}

    batches = data.training_mixture(shop.tokens, plan.seed)
    return Trainer("target", net, batches, _loss(shop, "target", net, plan, growth), plan, shop.folder / "target", measure)


def train_target(shop: Workshop) -> None:
    """Train the target to the end of its plan."""
    prepare(shop)
    target_run(shop).run()


def train_against_loops(shop: Workshop) -> None:
    """Train the finished target against its own loops to the end of the plan."""
    preset = shop.preset
    plan = shop.plan(preset.loops_plan)
    net = model.build(preset.target, preset, plan.seed, shop.device)
    learned = torch.load(shop.folder / "target" / "checkpoint.pt", map_location=shop.device, weights_only=True)
    net.load_state_dict(learned["model"])
    check_or_record_identity(shop.folder / "loops" / "run.json", {"target": fingerprint(net)})
    growth = replace(preset.growth, from_scratch=False, grow_at=0.0)
    text = _loss(shop, "loops", net, plan, growth)
    words = shop.tokenizer

    def measure(final: bool) -> dict[str, Any]:
        net.eval()
        chosen = loops.loop_prompts(shop.tokens, words)
        found = loops.measure(net, words, chosen if final else chosen[::4], report.SAMPLE_TOKENS)
        shares = {f"{how}_loops": found[how]["texts_that_end_in_a_loop"] for how in ("greedy", "sampled")}
        return {"bpb": evaluate.bits_per_byte(net, shop.held_out(final)), **shares}

    batches, loss = data.training_mixture(shop.tokens, plan.seed + 3), loops.LoopLoss(text, net, preset.against_loops)
    Trainer("loops", net, batches, loss, plan, shop.folder / "loops", measure).run()


def average(shop: Workshop, others: Sequence[Path]) -> None:
    """Average the weights of this folder's run against loops and of `others`, folders of such runs that began like it.

    "Model soups" (Wortsman et al. 2022, arXiv 2203.05482): the mean has a lower loss than each of them.
    """
    runs = [shop.folder / "loops", *others]
    weights = [torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)["model"] for run in runs]
    mean = {name: torch.stack([each[name] for each in weights]).mean(0) for name in weights[0]}
    (shop.folder / "average").mkdir(exist_ok=True)
    file = shop.folder / "average" / "checkpoint.pt"
    with named_errors(file), replaced(file) as unfinished:
        torch.save({"model": mean, "runs": [str(run) for run in runs]}, unfinished)


def finished(shop: Workshop) -> str:
    """Return the stage whose weights are the finished target."""
    return "average" if (shop.folder / "average" / "checkpoint.pt").is_file() else "loops"


def export_model(shop: Workshop, name: str, out: Path) -> None:
    """Export the last checkpoint of `target`, `loops` (the target after that stage), `average` or `draft`."""
    shape = shop.preset.draft if name == "draft" else shop.preset.target
    model.export(shop.folder / name / "checkpoint.pt", shape, shop.preset, shop.folder / "tokenizer", out)


def write_text(shop: Workshop, teacher: LlamaForCausalLM, rows: int) -> Tensor:
    """Return sequences written by the target, greedy and sampled: [rows, S + 1]. They are stored on disk.

    Raises ``OutriderError`` if those on disk are another target's, or another number.
    """
    path, settings = shop.folder / "generated" / "rows.pt", shop.preset.distillation
    check_or_record_identity(path.with_name("run.json"), {"target": fingerprint(teacher), "rows": rows})
    if path.exists():
        stored: Tensor = torch.load(path, weights_only=True)
        return stored
    plan = shop.preset.draft_plan
    others = data.training_mixture(shop.tokens, plan.seed + 1).batch(0, rows, settings.prompt_tokens)
    starts = prompts.mixed_prompts(shop.tokens, shop.tokenizer, rows, settings.prompt_tokens, others).to(shop.device)
    generator = torch.Generator(shop.device).manual_seed(plan.seed)
    written = []
    with shown("generate") as show:
        for batch in starts.split(settings.generation_batch):
            temperature = torch.ones(len(batch), device=shop.device)
            temperature[: round(len(batch) * settings.greedy_share)] = 0.0
            new_tokens = settings.new_tokens + 1
            written.append(continue_rows(teacher, batch, new_tokens, temperature, generator).cpu())
            show(sum(map(len, written)), rows, "")
    generated = torch.cat(written).to(torch.int32)
    with named_errors(path), replaced(path) as unfinished:
        torch.save(generated, unfinished)
    return generated


def new_draft(preset: Preset, teacher: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """Return a draft initialised with some of the target's layers, unchanged or reduced in width."""
    student = model.build(preset.draft, preset, seed, teacher.device)
    begin = copy_layers if preset.draft.hidden == preset.target.hidden else shrink
    begin(teacher, student, preset.distillation.layers)
    return student


def train_draft(shop: Workshop, target: Path, generated_rows: int | None = None) -> None:
    """Distil the draft from the target in a folder to the end of its plan."""
    preset, settings = shop.preset, shop.preset.distillation
    shop.claim_start("draft")
    plan = shop.plan(preset.draft_plan)
    teacher = model.load(target, shop.device).requires_grad_(False)
    rows = settings.generated_rows if generated_rows is None else generated_rows
    generated = write_text(shop, teacher, rows) if rows else torch.empty(0, 1)
    student = new_draft(preset, teacher, plan.seed + 1) if shop.start is None else model.load(shop.start, shop.device)
    dtype = arithmetic_dtype(shop.device)
    loss = DistillationLoss(student, teacher, Distillation(), dtype, plan.seed)
    if shop.compiled:
        for net in (student, teacher):
            model.compile_layers(net)
        loss.divergence = torch.compile(distillation.divergence, dynamic=False)
    corpus_rows = data.training_mixture(shop.tokens, plan.seed + 2)
    batches = data.DistillationRows(corpus_rows, generated, settings.generated_share)

    def measure(final: bool) -> dict[str, Any]:
        return {"bpb": evaluate.bits_per_byte(student, shop.held_out(final))}

    whole = model.plain_first(settings.plain_share, model.text_loss(student, dtype), loss)
    Trainer("draft", student, batches, whole, plan, shop.folder / "draft", measure).run()


def hardware() -> str:
    """Return a short description of this machine."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"


def finish(shop: Workshop, package: Path, curves: Path) -> None:
    """Export both models to `package`, measure them, and draw the curves."""
    for name, out in (
        ("target", shop.folder / "export" / "learned"),
        (finished(shop), package / "target"),
        ("draft", package / "draft"),
    ):
        export_model(shop, name, out)
    for name in card.RUNS:
        plots.draw(name, shop.folder / name, curves)
    learned = shop.tokenizer
    found = report.measure(package, shop.tokens, shop.held_out(long=True), learned)
    chosen = loops.loop_prompts(shop.tokens, learned)
    for name, folder in (("before", shop.folder / "export" / "learned"), ("after", package / "target")):
        found.setdefault("loops", {})[name] = loops.measure(model.load(folder), learned, chosen, report.SAMPLE_TOKENS)
    found["tokens"] = json.loads((shop.tokens / "tokens.json").read_text())
    runs = {name: json.loads((shop.folder / name / "run.json").read_text()) for name in ("target", "draft")}
    found["continued"] = [name for name, run in runs.items() if run["start"] is not None]
    (curves / "report.json").write_text(json.dumps(found, indent=1) + "\n")


def write_card(preset: Preset, package: Path, curves: Path, notes: card.Notes) -> None:
    """Write the model card from the output of `finish` in `curves`."""
    found = json.loads((curves / "report.json").read_text())
    history = {name: json.loads((curves / f"{name}_curve.json").read_text()) for name in card.RUNS}
    (package / "MODEL_CARD.md").write_text(card.render(preset, found, history, notes))
