"""``outrider demo``: a page on which plain and speculative decoding race."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import MethodOptions, ModelOptions, with_groups

if TYPE_CHECKING:
    from outrider.server.demo.track import Track

EXAMPLES = """Examples:

outrider demo --open

outrider demo --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --methods draft,suffix

outrider demo --host 0.0.0.0 --port 8080
"""
SERVER = "Server"
LARGE = (
    100_000_000  # parameters; up to this size every method is built, above it only those without a second copy of the weights
)


@with_groups
def command(
    *,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to offer (default: all that fit a small target; otherwise draft, if there is one, and ngram)."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 selects a free one.", rich_help_panel=SERVER)] = 8000,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.", rich_help_panel=SERVER)] = False,
    models: ModelOptions,
) -> None:
    """Serve a page on which plain and speculative decoding race, token by token."""
    from rich.text import Text

    from outrider.cli.console import err, waiting
    from outrider.types import OutriderError

    try:
        import uvicorn

        from outrider.server.bridge import load_aside
        from outrider.server.demo.app import Demo
        from outrider.server.run import listen
    except ImportError as missing:
        raise OutriderError(f"the demo needs {missing.name}: pip install 'outrider[serve]'") from None
    with listen(host, port) as listening:
        track = load_aside(lambda: load_track(models, methods))
        with waiting("warming up"):
            speed = load_aside(track.warm_up)
        demo = Demo(track, {"target": models.target or "embedded", "draft": models.draft, "plain_tok_s": speed})
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
        err.print(Text.assemble((url, "bold"), ("  (Ctrl-C to stop)", "dim")), soft_wrap=True)
        if open_page:
            import webbrowser

            webbrowser.open(url)
        server = uvicorn.Server(uvicorn.Config(demo.app(), log_level="warning", timeout_graceful_shutdown=2, lifespan="off"))
        try:
            server.run(sockets=[listening])
        finally:
            demo.close()


def load_track(models: ModelOptions, methods: str | None) -> Track:
    """Load the target once, and every offered method."""
    from outrider.cli.console import waiting
    from outrider.cli.session import load, resolve
    from outrider.engine.config import default_method
    from outrider.method_text import split_methods
    from outrider.registry import DEFAULT_METHOD, PROPOSERS
    from outrider.server.demo.track import Track

    wanted = [method.strip() for method in split_methods(methods)] if methods else []
    for method in wanted:  # errors appear before the seconds of loading
        resolve(models, MethodOptions(method=method))
    plain: Any = PROPOSERS.get("plain")
    llm = load(models, MethodOptions(method=plain.name), max_batch=2, compile=models.compile or "always")
    offered = wanted
    if not wanted:
        is_small = sum(weight.numel() for weight in llm.runner.model.parameters()) < LARGE
        usual = dict.fromkeys((default_method(models.draft, llm.speculation.drafts), DEFAULT_METHOD))
        offered = [name for name in PROPOSERS if name != plain.name] if is_small else list(usual)
    with waiting("preparing the methods"):
        return Track(llm, offered, models.draft, must_fit=bool(wanted))
