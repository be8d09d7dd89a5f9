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
    parent: Annotated[int | None, typer.Option("--beside", hidden=True)] = None,
) -> None:
    """Show runs in a browser, live: curves, answers, tokens, times. It reads and never writes."""
    from winnow.dashboard.beside import end_with_parent
    from winnow.dashboard.service import Dashboard
    from winnow.http.client import read_token
    from winnow.http.service import listen, listener_url, serve

    token = read_token(token_env, "--token-env")
    if parent is not None:
        end_with_parent()
    with closing(
        listen(host, port, token) if parent is None else socket.socket(fileno=parent)
    ) as listener:
        dashboard = Dashboard(runs or ["runs"], token)
        key = "" if token is None else f", with /?token=… as in {token_env}"
        line = f"Dashboard: {listener_url(listener)}/{key} (Ctrl-C ends it)"
        code = serve(dashboard, listener, line)
    raise typer.Exit(code)
