"""``outrider demo``: a web page that runs plain and speculative decoding side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from outrider.cli.console import err, waiting
from outrider.cli.options import MethodOptions, ModelOptions, flag, given, with_groups
from outrider.engine.options import Speculation
from outrider.errors import requires
from outrider.registry import DEFAULT_METHOD, PLAIN, PROPOSERS
from outrider.server.config import ServerConfig

if TYPE_CHECKING:
    from outrider.server.demo.track import Track

EXAMPLES = """Examples:

outrider demo --open

outrider demo --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --method draft,suffix

outrider demo --host 0.0.0.0 --port 8080
"""
SERVER = "Server"
VERIFIER = "rejection"  # has an acceptance probability for each draft, which the page shows
# Parameters: up to this size all methods are offered, above it only those that need no second copy of the weights.
LARGE = 100_000_000


@dataclass(frozen=True)
class PageOptions:
    """Methods on the page, and its address."""

    panel: ClassVar[str] = SERVER
    method: str | None = given(
        Speculation,
        several=True,
        more="(default: all that fit, or for targets above 100M parameters: suffix and the method found for the target).",
    )
    host: str = given(ServerConfig, ServerConfig.host)
    port: int = given(ServerConfig, ServerConfig.port)


@dataclass(frozen=True)
class DemoModelOptions(ModelOptions):
    """Models, with another default verifier."""

    verifier: str | None = given(Speculation, more=f"(default: {VERIFIER}, whose probabilities the page shows).")


@with_groups
def command(
    *,
    page: PageOptions,
    open_page: bool = flag("Open the page in a browser.", False, "--open", panel=SERVER),
    models: DemoModelOptions,
) -> None:
    """Serve a web page that runs plain and speculative decoding side by side, token by token."""
    from rich.text import Text

    with requires("serve", "the demo"):
        import uvicorn

        from outrider.server.demo.app import LIMITS, Demo
        from outrider.server.run import connections, listen, url_of
    config = ServerConfig(host=page.host, port=page.port, **LIMITS)
    with listen(config.host, config.port) as listening:
        track = load_track(models, page.method)
        with waiting("warming up"):
            speed = track.warm_up()
        demo = Demo(track, {"target": models.target or "embedded", "draft": models.draft, "plain_tok_s": speed})
        address, port = listening.getsockname()[:2]
        url = f"{url_of(config.host, port)}/"
        err.print(Text.assemble((url, "bold"), ("  (Ctrl-C to stop)", "dim")), soft_wrap=True)
        if open_page:
            import webbrowser

            webbrowser.open(url)
        settings = connections(demo.app(config, address), config)
        settings.timeout_graceful_shutdown = 2
        try:
            uvicorn.Server(settings).run(sockets=[listening])
        finally:
            demo.close()


def load_track(models: ModelOptions, methods: str | None) -> Track:
    """Load the target once, and every available method."""
    from outrider.cli.session import auto_method, load_plain, named_methods, resolve
    from outrider.server.demo.track import Track

    wanted = []
    if methods is not None:
        wanted = named_methods(methods, models)[1]
    else:
        resolve(models, MethodOptions())  # checks the draft, which is loaded after the target
    models = replace(models, verifier=models.verifier or VERIFIER)
    llm = load_plain(models, wanted, max_batch=2)
    offered = wanted
    if not wanted:
        is_small = sum(weight.numel() for weight in llm.runner.model.parameters()) < LARGE
        usual = dict.fromkeys((auto_method(models).text, DEFAULT_METHOD))
        offered = [name for name in PROPOSERS if name != PLAIN] if is_small else list(usual)
    with waiting("preparing the methods"):
        return Track(llm, offered, models.draft, must_fit=bool(wanted))
