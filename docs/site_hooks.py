"""Hooks of mkdocs: the pages of settings, made from the code; formulas; links out of the site."""

from __future__ import annotations

import re
from functools import reduce
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from winnow.config.load import REQUIRED, KeyHelp, describe_config
from winnow.config.root import Config
from winnow.config.schema import Key, all_keys, section_type, variants

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_WIDE = (
    *("coming_from.md", "metrics.md", "bad_input.md", "answers.md", "algorithms.md"),
    "support.md",
)
"""Pages of tables whose width is worth more than a list of their headings."""
_MARKS = re.compile(r"`[^`]*`|docs/(\w+)\.md|[*_<]")
_SETTINGS = """# Every setting

Made from the code, as `winnow train RECIPE --help-config PREFIX` prints it for a recipe. A key is
given on the command line as `KEY=VALUE`, or in a recipe by its place in the tree. A variant, such
as `algorithm/policy_loss=gspo`, is chosen as a whole; its keys exist where it is chosen.

| Section | What it sets |
|---|---|
"""


def _markdown(text: str | None) -> str:
    """Write a docstring as Markdown on one line: its signs as they are, its pages as links."""

    def written(mark: re.Match[str]) -> str:
        if mark[1]:
            return f"[{mark[1]}.md](../{mark[1]}.md)"
        return {"*": r"\*", "_": r"\_", "<": "&lt;"}.get(mark[0], mark[0])

    return _MARKS.sub(written, " ".join((text or "").split()))


def _entry(key: Key, row: KeyHelp) -> tuple[str, str]:
    """Write a key with default, type, meaning and variants; return the heading it stands below."""
    above, anchor = ".".join(key.path[:-1] or key.path), ".".join(key.path)
    if key.variant:
        union, chosen = key.variant
        above = f"{'/'.join(union)}={chosen}"
        if row.variant:  # the default's keys have the plain address
            anchor = ".".join((*union, chosen, *key.path[len(union) :]))
    default = "Required" if row.default == REQUIRED else f"Default `{row.default}`"
    options = variants(key.field)
    kind = "" if options else f" · {row.type}"
    lines = [f"### `{row.key}` {{ #{anchor} }}\n\n{default}{kind}<br>{_markdown(row.meaning)}\n"]
    for name, variant in options.items():
        has_keys = len(variant.model_fields) > 1
        shown = f"[`{name}`](#{'.'.join(key.path)}.{name})" if has_keys else f"`{name}`"
        lines.append(f"- {shown}: {_markdown(variant.__doc__)}")
    return above, "\n".join(lines)


def settings_pages() -> dict[str, str]:
    """Write a page for each section of a recipe, by its place in docs, and their index."""
    index, pages = _SETTINGS, {}
    for name, field in Config.model_fields.items():
        section = section_type(field.annotation)
        about = {name: _markdown(section.__doc__ if section else field.description)}
        parts: dict[str, dict[str, None]] = {name: {}}
        keys = (key for key in all_keys() if key.path[0] == name)
        for key, row in zip(keys, describe_config(Config(), name), strict=True):
            above, entry = _entry(key, row)
            parts.setdefault(above, {})[entry] = None  # once, if two variants share it
            for variant, cls in variants(key.field).items():
                about[f"{row.key}={variant}"] = _markdown(cls.__doc__)
            if above not in about:
                about[above] = _markdown(reduce(_field_type, key.path[:-1], Config).__doc__)
        lines = [f"# {name}", about[name], *parts.pop(name)]
        for above, entries in parts.items():
            anchor = re.sub("[/=]", ".", above)
            lines += [f"## {above} {{ #{anchor} }}", about[above], *entries]
        pages[f"settings/{name}.md"] = "\n\n".join(lines) + "\n"
        index += f"| [{name}]({name}.md) | {about[name]} |\n"
    return {"settings/index.md": index, **pages}


def _field_type(section: Any, name: str) -> Any:
    return section.model_fields[name].annotation


def on_config(config: Any) -> Any:
    """List pages that mkdocs.yml does not name at the end of the navigation, settings in theirs."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    pages = (page.name for page in Path(config.docs_dir).glob("*.md"))
    if more := sorted(set(pages) - named):
        config.nav.append({"More": more})
    (reference,) = (part["Reference"] for part in config.nav if "Reference" in part)
    (settings,) = (page for page in reference if "Every setting" in page)
    settings["Every setting"] = [*settings_pages()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of settings, and the dashboard's icon."""
    for name, content in settings_pages().items():
        files.append(File.generated(config, name, content=content))
    icon = ROOT / "frontend" / "public" / "icon.svg"
    files.append(File.generated(config, icon.name, abs_src_path=str(icon)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Name files of the repository that the site does not hold; give wide tables the width."""
    if page.file.generated_by:
        page.meta["search"] = {"boost": 2}
        return markdown
    if page.file.src_path in _WIDE:
        page.meta["hide"] = ["toc"]

    def named(link: re.Match[str]) -> str:
        if not (ROOT / link[2]).exists():
            raise PluginError(f"docs/{page.file.src_path} links to {link[2]}, which is not there")
        text = f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`"
        return f"{text} in the repository" + ")" * (link[1] != link[2])

    return _OUTSIDE.sub(named, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Write formulas as MathML, which browsers lay out without a script or a font of ours.

    The list of headings of a page of settings has its keys and parts, not the keys of each part.
    """
    if page.file.generated_by:
        for title in page.toc:
            for part in title.children:
                part.title, part.children = re.sub(rf"^{title.title}[./]", "", part.title), []

    def mathml(formula: re.Match[str]) -> str:
        return convert(unescape(formula[2]), "block" if formula[1] == "div" else "inline")

    html = html.replace("::</p>", ":</p>")  # reStructuredText's colons before code in docstrings
    return _FORMULA.sub(mathml, html)
