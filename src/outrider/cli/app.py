"""Command table, and the conversion of errors to one line on stderr and an exit code.

Exit codes: 0 success; 1 an internal or machine error (memory, disk), standard output was closed, or all requests of a load
failed in ``bench serve``; 2 invalid arguments; 3 a check failed: ``doctor`` found a misfit, ``bench compare`` a regression,
``audit`` could not certify; 130 Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from outrider.cli.options import in_flags
from outrider.errors import TARGET_FAILED, OutriderError, is_out_of_memory, one_line

# Each name is outrider.cli.<name>:command, or a group of the functions in its COMMANDS. With both, ``command`` runs when no
# subcommand is given.
COMMANDS = ("generate", "chat", "compare", "bench", "audit", "doctor", "tune", "train", "demo", "serve", "export")
EXIT_INTERNAL, EXIT_USAGE, EXIT_CHECK_FAILED, EXIT_INTERRUPTED = 1, 2, 3, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
received: list[int] = []  # signals of this command; one during an import may surface as an ImportError


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, which ends the command; Ctrl-C may end only its current action."""


def build_app() -> typer.Typer:
    """Return the application with all commands. Importing command modules imports neither torch nor transformers."""
    app = typer.Typer(
        name="outrider",
        help="Lossless speculative decoding for Hugging Face causal language models.",
        epilog="Help for one command: outrider generate --help",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        debug: Annotated[
            bool, typer.Option("--debug", help="Show tracebacks, also of failures that do not end the command.")
        ] = False,
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None:
        """Declare the options before the command name. ``main`` reads --debug itself."""

    for name in COMMANDS:
        module = import_module(f"outrider.cli.{name}")
        if not hasattr(module, "COMMANDS"):
            app.command(name, epilog=module.EXAMPLES)(module.command)
            continue
        if hasattr(module, "command"):
            group = typer.Typer(epilog=module.EXAMPLES, add_completion=False)
            group.callback(invoke_without_command=True)(module.command)
        else:
            group = typer.Typer(help=module.HELP, epilog=module.EXAMPLES, no_args_is_help=True, add_completion=False)
        for kind, command in module.COMMANDS.items():
            group.command(kind)(command)
        app.add_typer(group, name=name)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from outrider import __version__

        print(__version__)
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error is one line on stderr; ``--debug`` adds tracebacks."""
    args = list(sys.argv[1:] if argv is None else argv)
    own = args[: args.index("--")] if "--" in args else args  # arguments after -- are for another engine
    debug = "--debug" in own
    if debug:  # accepted before and after the command name
        args = [argument for argument in own if argument != "--debug"] + args[len(own) :]
        logging.getLogger("outrider").setLevel(logging.DEBUG)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - the parent process may have closed it
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - likewise
    gc.disable()  # saves 0.5 s of imports; session.load enables it again
    try:
        received.clear()
        # SIGTERM is handled like Ctrl-C: partial results are kept, child processes end. Background processes ignore SIGINT.
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with handled(interrupt, SIGNALS if is_default else (signal.SIGTERM,)):
            code = build_app()(args, prog_name="outrider", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # typer's exit code for Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, Exception) as error:
        with handled(signal.SIG_IGN):  # a second Ctrl-C must not interrupt the message of the first
            message, code = explain(error)
            if debug and code != EXIT_INTERRUPTED:
                import traceback

                traceback.print_exc()
            print(message if code == EXIT_INTERRUPTED else f"error: {message}", file=sys.stderr)
        return code
    finally:
        gc.enable()
        if "triton" in sys.modules:  # its bindings report frozen objects as leaked; the exit takes a second longer
            gc.unfreeze()


def run() -> NoReturn:
    """Entry point of the console script: run the command and exit with its code."""
    code = main()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # during Python's shutdown a signal would only print a traceback
    sys.exit(code)


@contextmanager
def handled(handler: Any, numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
    """Context manager: install ``handler`` for these signals in the main thread; restore the former handlers at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal: raise ``Terminated`` for SIGTERM, ``KeyboardInterrupt`` for Ctrl-C."""
    received.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def explain(error: BaseException) -> tuple[str, int]:
    """Return the error as one line, and the exit code."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)) or (isinstance(error, ImportError) and received):
        return "interrupted", EXIT_INTERRUPTED
    usage: Any = getattr(error, "format_message", None)  # an option error found by typer
    if usage is not None:
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context is not None else ""
        name = getattr(error, "option_name", "")
        short = name[1:]  # -k for --k, for which click would suggest --top-k
        if context is not None and any(short in each.opts for each in context.command.params):
            return f"No such option: {name} (use {short}){hint}", EXIT_USAGE
        return (one_line(str(usage()).rstrip(".")) or "no command was given") + hint, EXIT_USAGE
    is_ours = isinstance(error, OutriderError)
    if is_ours and TARGET_FAILED not in str(error):
        return in_flags(str(error)), EXIT_USAGE
    if is_out_of_memory(error):
        return f"out of memory ({one_line(str(error))[:120]}); try a smaller --max-len, batch or model", EXIT_INTERNAL
    if is_ours:
        return in_flags(str(error)), EXIT_INTERNAL
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where} (--debug shows where)", EXIT_INTERNAL
    return f"{type(error).__name__}: {one_line(str(error))[:300]} (--debug shows where)", EXIT_INTERNAL
