"""Arguments and options that several commands share."""

from typing import Annotated

from typer import Argument, Option

Recipe = Annotated[str, Argument(help="Shipped recipe (see `winnow recipes`) or YAML file.")]
Run = Annotated[str, Argument(metavar="RUN", help="Run folder, such as runs/NAME.")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="Recipe overrides in Hydra syntax.")
]
Step = Annotated[int | None, Option(help="Step of the checkpoint; the latest by default.")]
Trust = Annotated[
    bool, Option("--trust", help="Allow code, programs and links of a run you did not start.")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
PromptKey = Annotated[str | None, Option(help="Column that holds the prompt.")]
Host = Annotated[str, Option(help="Address to bind.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to bind; 0 picks a free one.")]
TokenEnv = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Environment variable with the access token; required where other machines can "
        "reach the server.",
    ),
]
