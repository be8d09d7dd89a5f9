"""`winnow sandbox`: run programs for others."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="sandbox",
    help="Run programs that a model wrote.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def sandbox() -> None:
    """Run programs that a model wrote."""


@app.command("serve")
def serve_command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the token that clients must send; a must where other "
            "machines can reach the server.",
        ),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Programs at once; as many as cores by default."),
    ] = None,
    max_queued: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 256,
    max_body_mb: Annotated[int, typer.Option(min=1, max=1024, help="Size of a request.")] = 16,
    max_time_s: Annotated[
        float, typer.Option(min=1, max=3600, help="Longest run_timeout of a request.")
    ] = 120,
    memory_mb: Annotated[
        int, typer.Option(min=64, help="Largest memory_limit_MB of a request, and the default.")
    ] = 1024,
    output_kb: Annotated[
        int,
        typer.Option(min=1, help="KiB that a program may write; one that writes more is ended."),
    ] = 1024,
    python: Annotated[str, typer.Option(help="The interpreter.")] = "/usr/bin/python3",
    backend: Annotated[
        Literal["auto", "bubblewrap", "landlock"], typer.Option(help="How programs are confined.")
    ] = "auto",
) -> None:
    """Serve the local sandbox by SandboxFusion's HTTP API (reward/sandbox=fusion asks for it)."""
    from winnow.config.reward import SandboxConfig
    from winnow.http.client import read_token
    from winnow.http.service import listen, listener_url, serve
    from winnow.sandbox.local import LocalSandbox
    from winnow.sandbox.server import SandboxServer

    config = SandboxConfig(
        backend=backend,
        python=python,
        max_concurrent=max_concurrent,
        time_s=max_time_s,
        memory_mb=memory_mb,
        output_kb=output_kb,
    )
    token = read_token(token_env, "--token-env")
    with closing(listen(host, port, token)) as listener, closing(LocalSandbox(config)) as sandbox:
        line = f"sandbox at {listener_url(listener)} ({sandbox.description})"
        with closing(SandboxServer(sandbox, token, max_body_mb << 20, max_queued)) as server:
            code = serve(server.service, listener, line)
    raise typer.Exit(code)
