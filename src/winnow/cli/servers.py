"""`winnow dashboard` and `winnow sandbox serve`: servers that run until Ctrl-C."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from winnow.cli.options import Host, Port, TokenEnv

sandbox_app = typer.Typer(help="Run programs written by a model.", no_args_is_help=True)


def dashboard_command(
    runs: Annotated[
        list[str] | None,
        Argument(
            metavar="RUNS",
            help="Run folders, folders of runs, or their URLs (s3://…); default: runs/.",
        ),
    ] = None,
    port: Port = 8040,
    host: Host = "127.0.0.1",
    token_env: TokenEnv = None,
    listen_fd: Annotated[int | None, Option("--listen-fd", hidden=True)] = None,
) -> None:
    """Show runs in a browser, live: curves, answers, tokens, times. Never writes to them."""
    from winnow.dashboard.service import Dashboard
    from winnow.dashboard.sidecar import exit_with_parent
    from winnow.http.client import read_token
    from winnow.http.service import listen, listener_url, serve

    token = read_token(token_env, "--token-env")
    if listen_fd is not None:
        exit_with_parent()
    inherited = None if listen_fd is None else socket.socket(fileno=listen_fd)
    with closing(inherited or listen(host, port, token)) as listener:
        key = "" if token is None else f", with /?token=… as in {token_env}"
        line = f"Dashboard: {listener_url(listener)}/{key} (Ctrl-C to stop)"
        code = serve(Dashboard(runs or ["runs"], token), listener, line)
    raise typer.Exit(code)


@sandbox_app.command("serve")
def serve_sandbox(
    port: Port = 8080,
    host: Host = "127.0.0.1",
    token_env: TokenEnv = None,
    max_concurrent: Annotated[
        int | None, Option(min=1, max=256, help="Concurrent programs; default: number of cores.")
    ] = None,
    max_queued: Annotated[int, Option(min=0, help="Maximum number of queued requests.")] = 256,
    max_body_mb: Annotated[int, Option(min=1, max=1024, help="Maximum request size, MiB.")] = 16,
    max_time_s: Annotated[
        float, Option(min=1, max=3600, help="Maximum run_timeout of a request, seconds.")
    ] = 120,
    memory_mb: Annotated[
        int, Option(min=64, help="Default and maximum memory_limit_MB of a request.")
    ] = 1024,
    output_kb: Annotated[
        int, Option(min=1, help="Maximum output in KiB; programs that exceed it are killed.")
    ] = 1024,
    python: Annotated[str, Option(help="Python interpreter.")] = "/usr/bin/python3",
    backend: Annotated[
        Literal["auto", "bubblewrap", "landlock"], Option(help="Isolation mechanism.")
    ] = "auto",
) -> None:
    """Serve the local sandbox over SandboxFusion's HTTP API (for reward/sandbox=fusion)."""
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
