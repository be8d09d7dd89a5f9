"""`winnow dashboard`: pages about runs, for a browser."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Annotated

import typer


def dashboard_command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUNS",
            help="Folders of runs, single runs, or URLs of either (s3://…); runs/ by default.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8040,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the token to ask for; a must where other machines can "
            "reach the server.",
        ),
    ] = None,
    listen_fd: Annotated[int | None, typer.Option("--listen-fd", hidden=True)] = None,
) -> None:
    """Show runs in a browser, live: curves, answers, tokens, times. It reads and never writes."""
    from winnow.dashboard.service import Dashboard
    from winnow.dashboard.sidecar import exit_with_parent
    from winnow.http.client import token_of
    from winnow.http.service import address_of, listen, serve

    token = token_of(token_env, "--token-env")
    if listen_fd is not None:
        exit_with_parent()
    inherited = None if listen_fd is None else socket.socket(fileno=listen_fd)
    with closing(inherited or listen(host, port, token)) as listener:
        dashboard = Dashboard(runs or ["runs"], token)
        key = "" if token is None else f", with /?token=… as in {token_env}"
        line = f"Dashboard: {address_of(listener)}/{key} (Ctrl-C ends it)"
        code = serve(dashboard, listener, line)
    raise typer.Exit(code)
