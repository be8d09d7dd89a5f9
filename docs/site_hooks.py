"""Hooks of mkdocs: the page of settings, made from the code; formulas; links out of the site."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_WIDE = (
    *("coming_from.md", "metrics.md", "bad_input.md", "answers.md", "algorithms.md"),
    "support.md",
)
"""Pages of tables whose width is worth more than a list of their headings."""
_HEAD = """# Every setting

Made from the code, as `winnow train RECIPE --help-config PREFIX` prints it for a recipe. A key is
given on the command line as `KEY=VALUE`, or in a recipe by its place in the tree. A variant, such
as `algorithm/policy_loss=gspo`, is chosen as a whole; its keys exist where it is chosen.
"""


def settings_page() -> str:
    """List every key with default, type and meaning, section by section."""
    from winnow.config.load import describe_config
    from winnow.config.root import Config

    lines, section = [_HEAD], ""
    for row in describe_config(Config()):
        name = re.split(r"[./]", row.key)[0]
        if name != section:
            section = name
            lines.append(f"\n## {section}\n")
        only = f" *Only with `{row.variant}`.*" if row.variant else ""
        lines.append(f"- `{row.key}` = `{row.default}` · {row.type}<br>{row.meaning}{only}")
    return "\n".join(lines) + "\n"


def on_config(config: Any) -> Any:
    """List pages that mkdocs.yml does not name at the end of the navigation."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    pages = (page.name for page in Path(config.docs_dir).glob("*.md"))
    if more := sorted(set(pages) - named):
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the page of settings, and the dashboard's icon."""
    files.append(File.generated(config, "settings.md", content=settings_page()))
    icon = ROOT / "frontend" / "public" / "icon.svg"
    files.append(File.generated(config, icon.name, abs_src_path=str(icon)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Name files of the repository that the site does not hold; give wide tables the width."""
    if page.file.src_path in _WIDE:
        page.meta["hide"] = ["toc"]

    def named(link: re.Match[str]) -> str:
        if not (ROOT / link[2]).exists():
            raise PluginError(f"docs/{page.file.src_path} links to {link[2]}, which is not there")
        text = f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`"
        return f"{text} in the repository" + ")" * (link[1] != link[2])

    return _OUTSIDE.sub(named, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Write formulas as MathML, which browsers lay out without a script or a font of ours."""

    def mathml(formula: re.Match[str]) -> str:
        return convert(unescape(formula[2]), "block" if formula[1] == "div" else "inline")

    return _FORMULA.sub(mathml, html)
