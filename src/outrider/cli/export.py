"""``outrider export``: write a plan as the launch command and config of another engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import say
from outrider.cli.options import MethodOptions, ModelOptions, flag, with_groups
from outrider.cli.serve import joined, refuse_own_code
from outrider.engine.plan import Plan
from outrider.export import ENGINES

EXAMPLES = """Examples:

outrider export plan.toml --to vllm

outrider export --to sglang --target Qwen/Qwen3-8B --method eagle:draft=./head -k 5 --out sglang

outrider export plan.toml --to vllm --own-code && ./outrider-vllm/run.sh --tensor-parallel-size 2
"""


@with_groups
def command(
    *,
    plan: Annotated[Path | None, typer.Argument(help="TOML file with options; command-line options take precedence.")] = None,
    to: Annotated[str, typer.Option("--to", help="vllm, sglang or transformers.")],
    out: Path | None = flag("Folder to write: new, empty, or an earlier export to this engine (default: outrider-<engine>)."),
    own_code: bool = flag("vLLM: use Outrider's proposer even if vLLM has its own (n-grams).", False, "--own-code"),
    models: ModelOptions,
    methods: MethodOptions,
) -> None:
    """Write the launch command, config and converted heads for running a plan on vLLM, SGLang or transformers."""
    from outrider.cli.session import check_source
    from outrider.export.deployment import read_deployment
    from outrider.export.engine import SCRIPT, check_folder, write

    refuse_own_code(models)
    engine = ENGINES.get(to)()
    known = joined(Plan() if plan is None else Plan.read(plan), models, methods)
    engine.check(known, own_code)
    folder = out or Path(f"outrider-{to}")
    check_folder(engine, folder)
    export = write(engine, read_deployment(known, partial(check_source, is_loaded_here=False)), folder, own_code)
    for note in export.notes:
        say(note)
    if export.needs_outrider:
        say("vLLM will import Outrider's proposer: run pip install --no-deps . in Outrider's folder with vLLM's Python")
    print(folder / SCRIPT)
